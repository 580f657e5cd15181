"""Variants: the logit transforms and masks that a user adds to attention, and the built-in ones.

    cap = 30.0
    wrapper.plan(..., variant=Variant(score_mod=lambda score, b, h, q_idx, kv_idx: cap * torch.tanh(score / cap)))
    wrapper.plan(..., variant=Variant(logit="score + bias[h, q_idx, kv_idx]", tensors={"bias": bias}))

`score` is in natural-log units, after sm_scale; `b` is the request in the plan, `h` the query head, `kv_idx` the
position in the request, `q_idx` = KV length - query length + row. Expressions compute in fp32 and 32-bit integers
(64-bit elements are narrowed); indices into captured tensors are not checked and do not wrap.
"""

from __future__ import annotations

import functools
import itertools
import operator
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..base.errors import VariantError
from .places import END, Places, Read
from .source import NAME, has_return, is_free_name, render, unique_name
from .spec import VariantSpec
from .traced import TracedVariant, scalar_type, tensor_type

if TYPE_CHECKING:
    import torch

__all__ = ["TracedVariant", "Variant", "alibi_slopes", "builtin", "compose", "render"]

_FLOAT_LITERAL = re.compile(r"(?<![\w.])((?:\d+\.\d*|\.\d+)(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+)(?![\w.])")
_EXPRESSIONS = operator.attrgetter("logit", "mask", "tensors", "scalars")
_OF_TENSORS = (*map(operator.attrgetter, ("dtype", "ndim", "layout")), operator.methodcaller("get_device"))
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


class Variant:
    """A logit transform, a mask, or both.

    Python callables in FlexAttention's style are traced to an expression: trace.py says what is traced and what
    is compiled in. C++ expressions use the same five names, what they capture, and the functions of variant.h; they run
    on vectors of tokens on the CPU, so write `select(condition, x, y)` for `condition ? x : y`. `floor_div` and `mod`
    (Python's // and %) give some number if an integer divisor is 0; `/` and `%` of two C++ ints then end the process.

    Args:
        score_mod: `(score, b, h, q_idx, kv_idx) -> score`.
        mask_mod: `(b, h, q_idx, kv_idx) -> bool`, True where the token is visible.
        logit: a C++ expression (or statements that end in a return) instead of `score_mod`.
        mask: the same instead of `mask_mod`.
        tensors: by name, indexed as `bias[h, q_idx, kv_idx]` or `bias(h, q_idx, kv_idx)`; 0 to 4 dimensions.
        scalars: numbers, by name. A change of value compiles nothing.
    """

    def __init__(
        self,
        score_mod: Callable[..., Any] | None = None,
        mask_mod: Callable[..., Any] | None = None,
        *,
        logit: str = "",
        mask: str = "",
        tensors: Mapping[str, torch.Tensor] | None = None,
        scalars: Mapping[str, float | int] | None = None,
    ) -> None:
        for names, function, text in (
            (("score_mod", "logit"), score_mod, logit),
            (("mask_mod", "mask"), mask_mod, mask),
        ):
            if function is not None and not callable(function):
                raise VariantError(f"{names[0]} is {type(function).__name__}, expected a callable")
            if not isinstance(text, str):
                raise VariantError(f"{names[1]} is {type(text).__name__}, expected the text of a C++ expression")
            if function is not None and text:
                raise VariantError(f"{names[0]} and {names[1]} are both given: give one of them")
        for name, values in (("tensors", tensors), ("scalars", scalars)):
            if values is not None and not isinstance(values, Mapping):
                raise VariantError(f"{name} is {type(values).__name__}, expected a mapping from names to values")
        self.score_mod, self.mask_mod = score_mod, mask_mod
        self.logit, self.mask = logit, mask
        self.tensors, self.scalars = dict(tensors or {}), dict(scalars or {})
        for name, text in (("logit", logit), ("mask", mask)):
            _stage(name, text, tuple(self.tensors))
        self._trace: Any = None

    def traced(self) -> TracedVariant:
        """Spec and current values. Callables are traced again only if something that they capture has changed."""
        parts = []
        if self.score_mod is not None or self.mask_mod is not None:
            from .trace import Trace  # needs torch, unlike C++ expressions and builds

            if self._trace is None:
                self._trace = Trace(self.score_mod, self.mask_mod)
            parts.append(self._trace.result())
        if self.logit or self.mask or self.tensors or self.scalars:
            parts.append(_from_expressions(self.logit, self.mask, self.tensors, self.scalars))
        return compose(*parts)

    def places(self) -> Places:
        """What the spec was made from by the last `traced`; as long as it is unchanged, another spec is not needed."""
        tensors, scalars = self.tensors.values(), self.scalars.values()
        names = functools.partial(itertools.chain, self.tensors, END, self.scalars, END)
        reads: list[Read] = [functools.partial(_EXPRESSIONS, self), names]
        if tensors:
            reads += (functools.partial(map, read, tensors) for read in _OF_TENSORS)
        if scalars:
            reads.append(functools.partial(map, type, scalars))
        own = Places.of(*reads)
        return own if self._trace is None else own.and_also(self._trace.places)


def _from_expressions(
    logit: str, mask: str, tensors: Mapping[str, torch.Tensor], scalars: Mapping[str, float | int]
) -> TracedVariant:
    for name in (*tensors, *scalars):
        if not is_free_name(name) or (name in tensors and name in scalars):
            raise VariantError(f"a captured value cannot be called {name!r}: the name is taken or is no C++ name")
    stages = _stage("logit", logit, tuple(tensors)), _stage("mask", mask, tuple(tensors))
    used = {name for stage in stages for name in NAME.findall(stage)}
    if unused := [name for name in (*tensors, *scalars) if name not in used]:
        raise VariantError(f"{', '.join(unused)} is captured but in no expression: use it or leave it out")
    spec = VariantSpec(
        *stages,
        tensors=tuple((name, tensor_type(name, tensor), tensor.ndim) for name, tensor in tensors.items()),
        scalars=tuple((name, scalar_type(name, value)) for name, value in scalars.items()),
    )
    return TracedVariant(spec, tuple(tensors.values()), tuple(scalars.values()))


@functools.lru_cache(maxsize=256)
def _stage(argument: str, text: str, tensors: tuple[str, ...]) -> str:
    """A user's text as one line: `bias[h, q_idx]` becomes `bias(h, q_idx)`, and floating literals become single
    precision."""
    line = " ".join(_COMMENT.sub(" ", text).split())
    if "#" in line or '"' in line:
        raise VariantError(f"{argument} holds a preprocessor line or a string, expected an expression: {line}")
    if ";" in line and not has_return(line):
        raise VariantError(f"{argument} holds statements that do not end in a return: {line}")
    return _FLOAT_LITERAL.sub(r"\1f", _brackets(argument, line, tensors))


def _brackets(argument: str, line: str, tensors: tuple[str, ...]) -> str:
    """Checks that brackets match, and turns the square brackets of tensors' indices into round ones."""
    closing = {"(": ")", "[": "]", "{": "}"}
    expected: list[tuple[str, str]] = []  # the closing bracket, and what is written for it
    result = ""
    for character in line:
        if character in closing:
            name = re.search(r"(?<![\w.])(\w+) ?$", result)
            called = character == "[" and name is not None and name[1] in tensors
            expected.append((closing[character], ")" if called else closing[character]))
            result += "(" if called else character
        elif character in closing.values():
            if not expected or expected[-1][0] != character:
                raise VariantError(f"{argument} has a {character!r} that closes nothing: {line}")
            result += expected.pop()[1]
        else:
            result += character
    if expected:
        raise VariantError(f"{argument} lacks a {expected[-1][0]!r}: {line}")
    return result


def alibi_slopes(num_heads: int) -> torch.Tensor:
    """ALiBi's slopes, [num_heads] fp32: 2^(-8 i / n) for n heads. If n is not a power of two, the slopes of the next
    lower power, then every second slope of twice as many heads."""
    import torch

    from ..base import checks

    checks.whole("num_heads", num_heads, 1, 1 << 16)
    power = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    slopes += [2.0 ** (-4.0 * (2 * i + 1) / power) for i in range(num_heads - power)]
    return torch.tensor(slopes, dtype=torch.float32, device="cpu")


def builtin(soft_cap: float | None = None, alibi_slopes: torch.Tensor | None = None) -> TracedVariant:
    """The built-in options as a variant; they come before a user's.

    ALiBi first, `score + slopes[h] * (kv_idx - q_idx)` with slopes [num_q_heads], then the soft cap over the sum,
    `soft_cap * tanh(score / soft_cap)` (None or 0: none). The order is FlashInfer's.
    """
    parts = []
    if alibi_slopes is not None:
        parts.append(TracedVariant(_alibi(tensor_type("alibi_slopes", alibi_slopes)), (alibi_slopes,)))
    if soft_cap:
        parts.append(TracedVariant(_SOFT_CAP, (), (float(soft_cap),)))
    return compose(*parts)


@functools.cache
def _alibi(element: str) -> VariantSpec:
    return VariantSpec("score + alibi_slopes(h) * to_float(kv_idx - q_idx)", tensors=(("alibi_slopes", element, 1),))


# The reciprocal does not depend on the token, so compilers move the division out of the loops.
_SOFT_CAP = VariantSpec("soft_cap * tanh(score * (1.0f / soft_cap))", scalars=(("soft_cap", "float"),))


def compose(*parts: TracedVariant) -> TracedVariant:
    """One variant after another: logits are chained in this order, all masks must hold, and slots get new numbers."""
    parts = tuple(part for part in parts if part.spec != VariantSpec())
    if len(parts) < 2:
        return parts[0] if parts else TracedVariant()
    return TracedVariant(
        _composed(*(part.spec for part in parts)),
        tuple(itertools.chain.from_iterable(part.tensors for part in parts)),
        tuple(itertools.chain.from_iterable(part.scalars for part in parts)),
    )


@functools.lru_cache(maxsize=256)
def _composed(*specs: VariantSpec) -> VariantSpec:
    logit: list[str] = []
    mask: list[str] = []
    tensors: list[tuple[str, str, int]] = []
    scalars: list[tuple[str, str]] = []
    taken: set[str] = set()
    for spec in specs:
        captured = [slot[0] for slot in spec.tensors] + [slot[0] for slot in spec.scalars]
        names = {name: unique_name(name, taken) for name in captured}
        logit += _renamed(spec.logit, names)
        mask += _renamed(spec.mask, names)
        tensors += [(names[name], element, rank) for name, element, rank in spec.tensors]
        scalars += [(names[name], kind) for name, kind in spec.scalars]
    return VariantSpec("\n".join(logit), "\n".join(mask), tuple(tensors), tuple(scalars))


def _renamed(text: str, names: dict[str, str]) -> list[str]:
    return NAME.sub(lambda match: names.get(match[0], match[0]), text).splitlines()
