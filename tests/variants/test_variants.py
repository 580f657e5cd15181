"""Variants as users and wrappers see them: identity, slots, composition, memoisation, built-in options, errors."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from variant_build import CompiledVariants
from variant_examples import (
    BIAS,
    CAP,
    DOCUMENT,
    HEADS,
    SLOPES,
    alibi,
    document_mask,
    rows,
    soft_cap,
    tensor_bias,
)

from flashpage.errors import VariantError
from flashpage.kernels.spec import KernelSpec, VariantSpec
from flashpage.variants import TracedVariant, Variant, alibi_slopes, builtin, compose, render

pytestmark = pytest.mark.usefixtures("quick_kernels")


def capped(cap: float, bias: torch.Tensor) -> Variant:
    return Variant(lambda score, b, h, q_idx, kv_idx: cap * torch.tanh(score / cap) + bias[h, kv_idx])


# Identity


def test_values_are_not_part_of_the_spec() -> None:
    one, other = capped(30.0, rows(4, 9)).traced(), capped(50.0, rows(7, 3).T).traced()
    assert one.spec == other.spec
    assert (one.scalars, other.scalars) == ((30.0,), (50.0,))
    assert one.tensors[0].shape == (4, 9) and other.tensors[0].shape == (3, 7)


@pytest.mark.parametrize(
    "other",
    [
        capped(30.0, rows(4, 9, dtype=torch.float16)),
        capped(30, rows(4, 9)),  # an int scalar
        Variant(
            lambda score, b, h, q_idx, kv_idx: 30.0 * torch.tanh(score / 30.0)
        ),  # the number is written in the callable
    ],
)
def test_types_are_part_of_the_spec(other: Variant) -> None:
    assert capped(30.0, rows(4, 9)).traced().spec != other.traced().spec


def test_spec_holds_no_address() -> None:
    spec = Variant(soft_cap, document_mask).traced().spec
    assert not re.search(r"0x|\d{7,}", repr(spec))
    assert Variant(soft_cap, document_mask).traced().spec == spec


def test_spec_survives_json() -> None:
    spec = KernelSpec("cpu_attention", variant=Variant(tensor_bias, document_mask).traced().spec)
    assert KernelSpec.from_json(spec.to_json()) == spec


def test_one_capture_in_both_callables_is_one_slot() -> None:
    table, limit = rows(5, 5), 3
    variant = Variant(
        lambda score, b, h, q_idx, kv_idx: score + table[h, kv_idx] * limit,
        lambda b, h, q_idx, kv_idx: (table[h, q_idx] > 1.0) & (kv_idx < limit),
    )
    spec = variant.traced().spec
    assert spec.tensors == (("table", "float32", 2),)
    assert spec.scalars == (("limit", "int"),)


def test_equal_values_of_two_captures_are_two_slots() -> None:
    def make(low: float, high: float) -> TracedVariant:
        return Variant(lambda score, b, h, q_idx, kv_idx: score.clamp(low, high)).traced()

    assert make(1.0, 1.0).spec == make(1.0, 2.0).spec
    assert make(1.0, 2.0).scalars == (1.0, 2.0)


def test_names_that_cpp_reserves() -> None:
    double, h_ = 2.0, rows(4)
    spec = Variant(lambda score, b, h, q_idx, kv_idx: score * double + h_[h]).traced().spec
    assert spec.scalars == (("captured_double", "float"),)
    exp, index = 3.0, 1
    spec = Variant(lambda score, b, h, q_idx, kv_idx: torch.exp(score) * exp + index).traced().spec
    assert [name for name, _ in spec.scalars] == ["captured_exp", "captured_index"]


def test_identity_and_true_are_the_empty_spec() -> None:
    variant = Variant(lambda score, b, h, q_idx, kv_idx: score, lambda b, h, q_idx, kv_idx: True)
    assert variant.traced() == TracedVariant()
    assert Variant().traced().spec == VariantSpec()
    assert Variant(None, lambda b, h, q_idx, kv_idx: False).traced().spec.mask == "false"


# C++ expressions


def expression(**changes: Any) -> Variant:
    given: dict[str, Any] = {
        "logit": "cap * tanh(score / cap) + 0.5 * bias[h, q_idx, kv_idx]",
        "mask": "kv_idx <= q_idx && // as in Python:\n doc(b, q_idx) == doc(b, kv_idx)",
        "tensors": {"bias": BIAS, "doc": DOCUMENT},
        "scalars": {"cap": CAP},
    }
    return Variant(**{**given, **changes})


def test_expressions_are_one_line_in_single_precision() -> None:
    traced = expression().traced()
    assert traced.spec == VariantSpec(
        "cap * tanh(score / cap) + 0.5f * bias(h, q_idx, kv_idx)",
        "kv_idx <= q_idx && doc(b, q_idx) == doc(b, kv_idx)",
        (("bias", "float32", 3), ("doc", "int64", 2)),
        (("cap", "float"),),
    )
    assert expression(scalars={"cap": 50.0}).traced().spec == traced.spec


BAD_EXPRESSIONS: list[tuple[str, dict[str, Any], str]] = [
    ("both", {"score_mod": soft_cap}, "score_mod and logit are both given"),
    ("not_callable", {"mask_mod": 3, "mask": ""}, "mask_mod is int, expected a callable"),
    ("not_text", {"logit": 3.0}, "logit is float, expected the text"),
    ("unused", {"mask": ""}, "doc is captured but in no expression"),
    ("name_taken", {"tensors": {"exp": BIAS, "bias": BIAS, "doc": DOCUMENT}}, "cannot be called 'exp'"),
    ("name_keyword", {"scalars": {"cap": 1.0, "float": 1.0}}, "cannot be called 'float'"),
    ("name_argument", {"scalars": {"cap": 1.0, "q_idx": 1}}, "cannot be called 'q_idx'"),
    ("name_twice", {"scalars": {"cap": 1.0, "bias": 1.0}}, "cannot be called 'bias'"),
    ("no_name", {"scalars": {"cap": 1.0, "a b": 1.0}}, "cannot be called 'a b'"),
    ("scalar_type", {"scalars": {"cap": "30"}}, "captured scalar 'cap' is str"),
    ("scalar_bool", {"scalars": {"cap": True}}, "captured scalar 'cap' is bool"),
    ("scalar_wide", {"scalars": {"cap": 2**40}}, "captured scalar 'cap' is 1099511627776"),
    ("dtype", {"tensors": {"bias": BIAS.double(), "doc": DOCUMENT}}, "captured tensor 'bias' has dtype float64"),
    ("rank", {"tensors": {"bias": BIAS[None, None], "doc": DOCUMENT}}, "captured tensor 'bias' has 5 dimensions"),
    ("sparse", {"tensors": {"bias": BIAS.to_sparse(), "doc": DOCUMENT}}, "has layout torch.sparse_coo"),
    ("missing_bracket", {"mask": "doc(b, q_idx"}, "mask lacks a ')'"),
    ("extra_bracket", {"mask": "doc[b, q_idx)"}, "mask has a ')' that closes nothing"),
    ("preprocessor", {"mask": "#if doc\n1"}, "mask holds a preprocessor line"),
    ("no_return", {"mask": "int x = doc(b, 1);"}, "mask holds statements that do not end in a return"),
]


@pytest.mark.parametrize(
    ("changes", "message"), [row[1:] for row in BAD_EXPRESSIONS], ids=[r[0] for r in BAD_EXPRESSIONS]
)
def test_bad_expression(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(VariantError, match=re.escape(message)):
        expression(**changes).traced()


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(4, dtype=torch.complex64), "has dtype complex64"),
        (torch.zeros(2, 1, 1, 1, 1, 3), "has 6 dimensions"),
    ],
)
def test_tensor_that_kernels_cannot_read(tensor: torch.Tensor, message: str) -> None:
    indices = ("h", "b", "b", "b", "b", "q_idx")[: tensor.ndim]
    scope = {"tensor": tensor}
    exec(f"score_mod = lambda score, b, h, q_idx, kv_idx: score + tensor[{', '.join(indices)}]", scope)
    with pytest.raises(VariantError, match=f"captured tensor 'tensor' {message}"):
        Variant(scope["score_mod"]).traced()


# Slots


def test_eight_slots_and_no_more() -> None:
    def many(count: int) -> dict[str, Any]:
        names = [f"x{i}" for i in range(count)]
        return {"logit": " + ".join(["score", *names]), "scalars": dict.fromkeys(names, 1.0)}

    assert len(Variant(**many(8)).traced().spec.scalars) == 8
    with pytest.raises(VariantError, match=r"captures 9 scalars \(x0, x1, .*, x8\), at most 8"):
        Variant(**many(9)).traced()
    with pytest.raises(VariantError, match="captures 9 scalars"):
        compose(builtin(30.0), Variant(**many(8)).traced())


def test_nine_tensors_are_refused() -> None:
    tables = [rows(HEADS) for _ in range(9)]

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        for table in tables:
            score = score + table[h]
        return score

    with pytest.raises(VariantError, match=r"captures 9 tensors \(tables, tables_2, .*, tables_9\), at most 8"):
        Variant(score_mod).traced()


# Built-in options and composition


def test_alibi_slopes() -> None:
    assert alibi_slopes(8).tolist() == [2.0 ** -(i + 1) for i in range(8)]
    twelve = alibi_slopes(12)
    assert torch.equal(twelve[:8], alibi_slopes(8)) and torch.equal(twelve[8:], alibi_slopes(16)[0:8:2])
    assert alibi_slopes(1).tolist() == [2.0**-8]


def test_builtin_none() -> None:
    assert builtin(None, None) == builtin(0.0, None) == compose() == TracedVariant()


def test_builtin_keeps_its_spec() -> None:
    assert builtin(30.0, SLOPES).spec is builtin(50.0, alibi_slopes(32)).spec


def test_composition_renames_and_renumbers() -> None:
    soft_cap = 3.0
    user = Variant(lambda score, b, h, q_idx, kv_idx: score * soft_cap, lambda b, h, q_idx, kv_idx: kv_idx < 9).traced()
    both = compose(builtin(30.0, SLOPES), user, Variant(mask_mod=document_mask).traced())
    assert both.spec.logit.splitlines() == [
        "score + alibi_slopes(h) * to_float(kv_idx - q_idx)",
        "soft_cap * tanh(score * (1.0f / soft_cap))",
        "score * soft_cap_2",
    ]
    assert both.spec.mask.splitlines() == ["kv_idx < 9", "DOCUMENT(b, q_idx) == DOCUMENT(b, kv_idx)"]
    assert both.scalars == (30.0, 3.0)
    assert both.tensors[0] is SLOPES and both.tensors[1] is DOCUMENT


def statements(text: str) -> Variant:
    return Variant(logit=text, tensors={"slopes": SLOPES}, scalars={"count": 3})


STATEMENTS = "float sum = 0; for (int i = 0; i < count; ++i) sum += slopes[i]; return score + sum;"
EXACT = [
    # a variant, and torch's result for (score, b, h, q_idx, kv_idx)
    (builtin(CAP, None), lambda s, b, h, q, k: CAP * torch.tanh(s / CAP)),
    (builtin(None, SLOPES), lambda s, b, h, q, k: s + SLOPES[h] * (k - q)),
    (builtin(CAP, SLOPES), lambda s, b, h, q, k: CAP * torch.tanh((s + SLOPES[h] * (k - q)) / CAP)),
    (
        compose(builtin(CAP, None), Variant(tensor_bias).traced()),
        lambda s, b, h, q, k: CAP * torch.tanh(s / CAP) + BIAS[h, q, k],
    ),
    (
        compose(Variant(tensor_bias).traced(), builtin(CAP, None), Variant(alibi).traced()),
        lambda s, b, h, q, k: CAP * torch.tanh((s + BIAS[h, q, k]) / CAP) + SLOPES[h] * (k - q),
    ),
    (statements(STATEMENTS).traced(), lambda s, b, h, q, k: s + SLOPES[:3].sum()),
    (expression().traced(), lambda s, b, h, q, k: CAP * torch.tanh(s / CAP) + 0.5 * BIAS[h, q, k]),
    (
        Variant(logit="slopes[h] * (kv_idx - q_idx) + min(score, 1)", tensors={"slopes": SLOPES}).traced(),
        lambda s, b, h, q, k: SLOPES[h] * (k - q) + s.clamp(max=1.0),
    ),
    (
        Variant(logit="select(kv_idx % 2 == 0 || !(h > 1), score, -infinity)").traced(),
        lambda s, b, h, q, k: torch.where((k % 2 == 0) | ~(h > 1), s, -math.inf),
    ),
]


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> CompiledVariants:
    return CompiledVariants([variant.spec for variant, _ in EXACT], tmp_path_factory.mktemp("exact"))


@pytest.mark.parametrize("lanes", [False, True], ids=["scalars", "lanes"])
@pytest.mark.parametrize("number", range(len(EXACT)))
def test_variants_compute_what_torch_does(exact: CompiledVariants, number: int, lanes: bool) -> None:
    variant, by_torch = EXACT[number]
    count = 256
    score = torch.randn(count, generator=torch.Generator().manual_seed(1)) * 15
    groups = torch.arange(count) // 16
    index = torch.stack([groups % 3, groups % HEADS, groups * 2, (torch.arange(count) % 16) * 2], 1).to(torch.int32)
    logits, _ = exact.evaluate(number, variant, score, index, lanes)
    torch.testing.assert_close(logits, by_torch(score, *index.unbind(1)), rtol=3e-6, atol=3e-6)


def test_text_divides_lanes_by_0(tmp_path: Path) -> None:
    """The CPU calls both functions with lanes of kv_idx; C++'s own division of two ints ends the process on x86."""
    text = "select(periods[b] == 0, score, score + kv_idx / periods[b] + kv_idx % periods[b])"
    variant = Variant(logit=text, tensors={"periods": torch.tensor([0, 3])}).traced()
    index = torch.tensor([[token // 16, 0, 0, token % 16] for token in range(32)], dtype=torch.int32)
    score = torch.randn(32)
    logits, _ = CompiledVariants([variant.spec], tmp_path).evaluate(0, variant, score, index, True)
    token = torch.arange(16)
    torch.testing.assert_close(logits, score + torch.cat([token * 0, token // 3 + token % 3]))


def test_tanh_is_accurate_everywhere(tmp_path: Path) -> None:
    score = torch.cat([torch.logspace(-30, 1.2, 4000), -torch.logspace(-3, 1.2, 4000), torch.linspace(7.9, 8.1, 192)])
    index = torch.zeros(len(score), 4, dtype=torch.int32)
    variant = Variant(logit="tanh(score)").traced()
    compiled = CompiledVariants([variant.spec], tmp_path)
    expected = torch.tanh(score.double())
    for lanes in (False, True):
        logits, _ = compiled.evaluate(0, variant, score, index, lanes)
        assert ((logits - expected) / expected).abs().max() < 6e-7


def test_render_names_the_users_lines() -> None:
    spec = compose(builtin(30.0), expression().traced()).spec
    lines = render(spec).splitlines()
    for part, text in (("logit", spec.logit), ("mask", spec.mask)):
        for number, stage in enumerate(text.splitlines(), 1):
            assert lines[lines.index(f'#line {number} "flashpage variant: {part}"') + 1] == stage
    # After a user's lines, the line numbers are those of the file.
    for place, line in enumerate(lines, 1):
        if line.endswith('"flashpage rendered variant"'):
            assert line == f'#line {place + 1} "flashpage rendered variant"'
