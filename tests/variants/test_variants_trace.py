"""Every traced operation, compared with torch's evaluation of the same callable, on scalars and on lanes; an operation
that cannot be traced is named with the user's line."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from variant_build import GROUP, CompiledVariants
from variant_examples import BATCH, BIAS, DOCUMENTED, HEADS, OPERATIONS, TOKENS, Example

from flashpage.errors import VariantError
from flashpage.variants import Variant

EXAMPLES = DOCUMENTED + OPERATIONS


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> CompiledVariants:
    specs = [Variant(example.score_mod, example.mask_mod).traced().spec for example in EXAMPLES]
    return CompiledVariants(specs, tmp_path_factory.mktemp("variants"))


@pytest.fixture(scope="module")
def points() -> tuple[torch.Tensor, torch.Tensor]:
    """Scores and (b, h, q_idx, kv_idx); GROUP neighbours share all indices but the token's."""
    generator = torch.Generator().manual_seed(5)
    groups = 64
    rows = torch.stack([torch.randint(0, most, (groups,), generator=generator) for most in (BATCH, HEADS, TOKENS)], 1)
    tokens = torch.randint(0, TOKENS - GROUP, (groups, 1), generator=generator) + torch.arange(GROUP)
    index = torch.cat([rows.repeat_interleave(GROUP, 0), tokens.reshape(-1, 1)], 1).to(torch.int32)
    score = torch.randn(groups * GROUP, generator=generator) * 12
    score[::97] = 0.0
    return score, index.contiguous()


@pytest.mark.parametrize("lanes", [False, True], ids=["scalars", "lanes"])
@pytest.mark.parametrize("number", range(len(EXAMPLES)), ids=[example.name for example in EXAMPLES])
def test_traced_callable_computes_what_torch_does(
    compiled: CompiledVariants, points: tuple[torch.Tensor, torch.Tensor], number: int, lanes: bool
) -> None:
    example, (score, index) = EXAMPLES[number], points
    variant = Variant(example.score_mod, example.mask_mod).traced()
    logits, visible = compiled.evaluate(number, variant, score, index, lanes)
    expected, expected_visible = _by_torch(example, score, index)
    assert torch.equal(visible, expected_visible)
    finite = torch.isfinite(expected)
    assert torch.equal(logits[~finite], expected[~finite])
    error = (logits - expected).abs() / (1 + score.abs() + expected.abs())
    assert error[finite].max() <= example.tolerance


def _by_torch(example: Example, score: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    columns = index.unbind(1)
    score_mod = example.elementwise or example.score_mod
    logits = score_mod(score, *columns) if score_mod else score
    visible = example.mask_mod(*columns) if example.mask_mod else True
    return (
        torch.as_tensor(logits, dtype=torch.float32).expand(len(score)),
        torch.as_tensor(visible).to(torch.bool).expand(len(score)),
    )


def _if(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score if kv_idx > q_idx else 2 * score


def _loop(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    for _ in range(kv_idx):
        score = score * 2
    return score


def _write(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    BIAS[h, q_idx, kv_idx] = score
    return score


def _local_in_place(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    score.mul_(2)
    return score


def _nothing(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    score * 2


ARRAY = np.zeros(TOKENS)
UNSUPPORTED: list[tuple[str, Callable[..., Any], str, str]] = [
    # name, callable, the operation as the message names it, a part of the user's line
    ("if", _if, "Python's if", "return score if kv_idx > q_idx else 2 * score"),
    ("and", lambda s, b, h, q, k: torch.where(k > q and h > 1, s, 0), "Python's if", "k > q and h > 1"),
    ("min", lambda s, b, h, q, k: min(s, k), "torch.minimum", "min(s, k)"),
    ("in", lambda s, b, h, q, k: s * (h in (1, 2)), "Python's if", "h in (1, 2)"),
    ("range", _loop, "a Python integer (range", "for _ in range(kv_idx):"),
    ("array", lambda s, b, h, q, k: s + ARRAY[k], "score_mod raised IndexError", "ARRAY[k]"),
    ("math", lambda s, b, h, q, k: math.tanh(s), "float() or a function of math", "math.tanh(s)"),
    ("int", lambda s, b, h, q, k: int(s), "int()", "int(s)"),
    ("item", lambda s, b, h, q, k: s.item(), ".item", "s.item()"),
    ("function", lambda s, b, h, q, k: torch.erf(s), "torch.erf", "torch.erf(s)"),
    ("functional", lambda s, b, h, q, k: torch.nn.functional.gelu(s), "torch.gelu", "gelu(s)"),
    ("method", lambda s, b, h, q, k: s.cumsum(0), ".cumsum", "s.cumsum(0)"),
    ("in_place", _local_in_place, ".mul_ (in place)", "score.mul_(2)"),
    ("write", _write, "torch.__setitem__ (in place)", "BIAS[h, q_idx, kv_idx] = score"),
    ("slice", lambda s, b, h, q, k: s + BIAS[h, :, k], "slice as an index", "BIAS[h, :, k]"),
    ("float_index", lambda s, b, h, q, k: s + BIAS[h, q, s], "a traced float as an index", "BIAS[h, q, s]"),
    ("mask_index", lambda s, b, h, q, k: s + BIAS[h, q, k > 3], "a traced bool as an index", "BIAS[h, q, k > 3]"),
    (
        "too_many",
        lambda s, b, h, q, k: s + BIAS[b, h, q, k],
        "4 indices into a captured tensor of 3",
        "BIAS[b, h, q, k]",
    ),
    ("too_few", lambda s, b, h, q, k: s + BIAS[h, q], "a row of a captured tensor", "s + BIAS[h, q]"),
    ("whole", lambda s, b, h, q, k: s + BIAS, "a captured tensor of 3 dimensions", "s + BIAS"),
    ("outside", lambda s, b, h, q, k: s + BIAS[h, q, 99], "index 99 into a dimension of 48", "BIAS[h, q, 99]"),
    ("reduction", lambda s, b, h, q, k: s + BIAS[h].sum(), ".sum of a row", "BIAS[h].sum()"),
    ("subscript", lambda s, b, h, q, k: s[0], "indexing a traced value", "s[0]"),
    ("iterate", lambda s, b, h, q, k: sum(s), "a loop over a traced value", "sum(s)"),
    ("len", lambda s, b, h, q, k: s * len(k), "the length of a traced value", "len(k)"),
    ("string", lambda s, b, h, q, k: s + "1", "a str as a number", 's + "1"'),
    ("nan", lambda s, b, h, q, k: torch.where(k > q, float("nan"), s), "the constant NaN", "nan"),
    ("wide", lambda s, b, h, q, k: s * (k + 2**40), "the integer 1099511627776", "2**40"),
    ("power", lambda s, b, h, q, k: s**2.5, "** 2.5", "s**2.5"),
    ("power_traced", lambda s, b, h, q, k: s**k, "** with an exponent that differs", "s**k"),
    ("float_bits", lambda s, b, h, q, k: s & 1, "& of a float", "s & 1"),
    ("invert_float", lambda s, b, h, q, k: ~s, "~ of a float", "~s"),
    ("minus_bool", lambda s, b, h, q, k: s - (k > q), "- of a bool", "s - (k > q)"),
    ("narrow", lambda s, b, h, q, k: s.to(torch.int8), ".to(torch.int8)", "s.to(torch.int8)"),
    ("rounding", lambda s, b, h, q, k: torch.div(s, 3, rounding_mode="trunc"), "rounding_mode='trunc'", "trunc"),
    ("numpy", lambda s, b, h, q, k: np.arctan2(s, 1.0), ".arctan2", "np.arctan2(s, 1.0)"),
    ("undefined", lambda s, b, h, q, k: s + missing, "NameError: name 'missing'", "s + missing"),  # noqa: F821
    ("nothing", _nothing, "returned a NoneType", "def _nothing"),
    ("arity", lambda s, b, h, q: s, "called as score_mod(score, b, h, q_idx, kv_idx)", "lambda s, b, h, q: s"),
]


@pytest.mark.parametrize(
    ("function", "named", "line"), [row[1:] for row in UNSUPPORTED], ids=[r[0] for r in UNSUPPORTED]
)
def test_unsupported_operation_is_named_with_the_users_line(
    function: Callable[..., Any], named: str, line: str
) -> None:
    with pytest.raises(VariantError) as caught:
        Variant(function).traced()
    message, where, shown = str(caught.value).rsplit("\n", 2)
    first_line, code = function.__code__.co_firstlineno, function.__code__
    assert named in message
    assert line in shown
    number = int(where.partition(", line ")[2].partition(",")[0])
    assert Path(code.co_filename).name in where and number in {line for *_, line in code.co_lines()} | {first_line}


def test_line_of_a_helper_that_the_callable_calls() -> None:
    def helper(value: Any) -> Any:
        return value.erf()

    with pytest.raises(VariantError, match=r"in helper\n    return value.erf\(\)$"):
        Variant(lambda s, b, h, q, k: helper(s)).traced()


def test_tracing_leaves_torch_as_it_was() -> None:
    with pytest.raises(VariantError):
        Variant(_if).traced()
    assert torch.equal(torch.where(torch.tensor([True]), 1.0, 2.0), torch.tensor([1.0]))
    assert BIAS[0, 0, 0] == BIAS.flatten()[0]
