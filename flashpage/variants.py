"""Variants: a logit transform and a mask that a user adds to attention, and the built-in ones, as C++ source plus values.

    cap = 30.0
    wrapper.plan(..., variant=Variant(score_mod=lambda score, b, h, q_idx, kv_idx: cap * torch.tanh(score / cap)))
    wrapper.plan(..., variant=Variant(logit="score + bias(h, q_idx, kv_idx)", tensors={"bias": bias}))

`score` is in natural-log units, after sm_scale; `b` is the request in the plan, `h` the query head, `kv_idx` the position in
the request, `q_idx` = KV length - query length + row. Expressions compute in fp32 and 32-bit integers.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from .dtypes import DType
from .errors import VariantError
from .spec import VariantSpec

if TYPE_CHECKING:
    import torch

MAX_TENSORS = 8  # of include/flashpage/params.h VariantArgs
MAX_SCALARS = 8
MAX_RANK = 4

SOURCE_NAME = "flashpage variant"  # the file name that compilers give for a line of the user's; see source_line

# Functions of include/flashpage/variant.h that an expression may use.
FUNCTIONS = frozenset(
    "to_float to_int to_bool div floor_div mod select min max abs exp log tanh sigmoid sqrt floor infinity "
    "logical_and logical_or logical_xor logical_not".split()
)
_ELEMENT_CPP = {d.value: d.cpp for d in DType if not d.is_fp8} | {
    "int8": "flashpage::i8",
    "uint8": "flashpage::u8",
    "int16": "flashpage::i16",
    "int32": "flashpage::i32",
    "int64": "flashpage::i64",
    "bool": "bool",
}
_SCALAR_CPP = {"float": "float", "int": "flashpage::i32"}
_KEYWORDS = frozenset(
    "alignas alignof and asm auto bitand bitor bool break case catch char class co_await co_return co_yield compl concept "
    "const consteval constexpr constinit continue decltype default delete do double else enum explicit export extern false "
    "float for friend goto if inline int long mutable namespace new noexcept not nullptr operator or private protected "
    "public register requires return short signed sizeof static struct switch template this throw true try typedef typeid "
    "typename union unsigned using virtual void volatile wchar_t while xor asm F I Variant flashpage captured visible".split()
)
_ARGUMENTS = ("score", "b", "h", "q_idx", "kv_idx")
_NAME = re.compile(r"[A-Za-z_]\w*")
_FLOAT_LITERAL = re.compile(r"(?<![\w.])((?:\d+\.\d*|\.\d+)(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+)(?![\w.])")


def is_free_name(name: str) -> bool:
    """Whether a captured value may have this name in C++."""
    taken = name in FUNCTIONS or name in _KEYWORDS or name in _ARGUMENTS or "__" in name
    return bool(_NAME.fullmatch(name)) and not taken


@dataclasses.dataclass(frozen=True)
class TracedVariant:
    """The identity of a variant (compiled in) and the values of its slots (given at every run)."""

    spec: VariantSpec = VariantSpec()
    tensors: tuple[torch.Tensor, ...] = ()
    scalars: tuple[float | int, ...] = ()

    def __post_init__(self) -> None:
        for what, names, most in (
            ("tensors", [t[0] for t in self.spec.tensors], MAX_TENSORS),
            ("scalars", [s[0] for s in self.spec.scalars], MAX_SCALARS),
        ):
            if len(names) > most:
                listed = ", ".join(names)
                raise VariantError(
                    f"the variant captures {len(names)} {what} ({listed}), at most {most}: merge some of them"
                )


class Variant:
    """A logit transform, a mask, or both.

    Python callables in FlexAttention's style, traced to an expression (flashpage/variant_trace.py says what is traced and
    what is compiled in), or C++ expressions over the same five names:

    Args:
        score_mod: `(score, b, h, q_idx, kv_idx) -> score`.
        mask_mod: `(b, h, q_idx, kv_idx) -> bool`, True where the token is visible.
        logit: a C++ expression (or statements that end in a return) instead of `score_mod`.
        mask: the same instead of `mask_mod`.
        tensors: names usable in the C++ expressions, indexed as `bias(h, q_idx, kv_idx)`; 0 to 4 dimensions.
        scalars: the same for numbers, given at every run: a change of value compiles nothing.

    C++ expressions may use the functions of include/flashpage/variant.h. They run on vectors of tokens on the CPU: write
    `select(condition, x, y)` for `condition ? x : y`.
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
        for callable_name, given, text_name, text in (
            ("score_mod", score_mod, "logit", logit),
            ("mask_mod", mask_mod, "mask", mask),
        ):
            if given is not None and text:
                raise VariantError(f"{callable_name} and {text_name} are both given: give one of them")
            if given is not None and not callable(given):
                raise VariantError(f"{callable_name} is {type(given).__name__}, expected a callable")
            if not isinstance(text, str):
                raise VariantError(f"{text_name} is {type(text).__name__}, expected the text of a C++ expression")
        self.score_mod, self.mask_mod = score_mod, mask_mod
        self.logit, self.mask = logit, mask
        self.tensors, self.scalars = dict(tensors or {}), dict(scalars or {})
        self._trace: Any = None

    def traced(self) -> TracedVariant:
        """Spec and present values. Callables are traced again only where something they capture is another object."""
        parts = []
        if self.score_mod is not None or self.mask_mod is not None:
            from .variant_trace import Trace  # needs torch, which C++ expressions and the build do not

            if self._trace is None:
                self._trace = Trace(self.score_mod, self.mask_mod)
            parts.append(self._trace.result())
        if self.logit or self.mask or self.tensors or self.scalars:
            parts.append(_from_expressions(self.logit, self.mask, self.tensors, self.scalars))
        return compose(*parts)


def tensor_type(name: str, tensor: torch.Tensor) -> str:
    """The element type's name in a spec; refuses what kernels cannot read."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in _ELEMENT_CPP:
        raise VariantError(
            f"captured tensor {name!r} has dtype {dtype}: convert it to one of {', '.join(_ELEMENT_CPP)}"
        )
    if tensor.ndim > MAX_RANK:
        raise VariantError(
            f"captured tensor {name!r} has {tensor.ndim} dimensions, at most {MAX_RANK}: flatten some of them"
        )
    if tensor.layout.__str__() != "torch.strided":
        raise VariantError(f"captured tensor {name!r} has layout {tensor.layout}: convert it with .to_dense()")
    if tensor.ndim and abs(tensor.stride(-1)) >= 2**31:
        raise VariantError(
            f"captured tensor {name!r} has stride {tensor.stride(-1)} in its last dimension: make it contiguous"
        )
    return dtype


def scalar_type(name: str, value: float | int) -> str:
    """ "float" or "int"; refuses other types and integers of more than 32 bits."""
    if isinstance(value, float):
        return "float"
    if isinstance(value, bool) or not isinstance(value, int):
        raise VariantError(f"captured scalar {name!r} is {type(value).__name__}, expected a Python float or int")
    if not -(2**31) <= value < 2**31:
        raise VariantError(f"captured scalar {name!r} is {value}, expected a 32-bit integer: use a float")
    return "int"


def _from_expressions(
    logit: str, mask: str, tensors: Mapping[str, torch.Tensor], scalars: Mapping[str, float | int]
) -> TracedVariant:
    for name in (*tensors, *scalars):
        if not is_free_name(name) or (name in tensors and name in scalars):
            raise VariantError(
                f"a captured value cannot be called {name!r}: it is not a C++ name or means something else"
            )
    stages = _stage("logit", logit), _stage("mask", mask)
    used = {name for stage in stages for name in _NAME.findall(stage)}
    if unused := [name for name in (*tensors, *scalars) if name not in used]:
        raise VariantError(f"{', '.join(unused)} is captured but in no expression: use it or leave it out")
    spec = VariantSpec(
        *stages,
        tensors=tuple((name, tensor_type(name, t), t.ndim) for name, t in tensors.items()),
        scalars=tuple((name, scalar_type(name, v)) for name, v in scalars.items()),
    )
    return TracedVariant(spec, tuple(tensors.values()), tuple(scalars.values()))


@functools.lru_cache(maxsize=256)
def _stage(argument: str, text: str) -> str:
    """A user's expression as one line; floating literals become single precision."""
    text = " ".join(re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.DOTALL).split())
    if "#" in text or '"' in text:
        raise VariantError(f"{argument}: a C++ expression holds no preprocessor line and no string: {text}")
    if ";" in text and not re.search(r"\breturn\b", text):
        raise VariantError(f"{argument}: statements must end in a return: {text}")
    _check_brackets(argument, text)
    return _FLOAT_LITERAL.sub(r"\1f", text)


def _check_brackets(argument: str, text: str) -> None:
    expected = []
    for character in text:
        if character in "([{":
            expected.append(")]}"["([{".index(character)])
        elif character in ")]}" and (not expected or expected.pop() != character):
            raise VariantError(f"{argument}: {character!r} closes nothing: {text}")
    if expected:
        raise VariantError(f"{argument}: {expected[-1]!r} is missing: {text}")


def alibi_slopes(num_heads: int) -> torch.Tensor:
    """ALiBi's slopes, [num_heads] fp32: 2^(-8i/n) for n heads; where n is no power of two, the rest comes from every
    second slope of twice as many heads."""
    import torch

    power = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    slopes += [2.0 ** (-4.0 * (2 * i + 1) / power) for i in range(num_heads - power)]
    return torch.tensor(slopes, dtype=torch.float32)


def builtin(soft_cap: float | None = None, alibi_slopes: torch.Tensor | None = None) -> TracedVariant:
    """The built-in options as a variant: ALiBi, then `soft_cap * tanh(score / soft_cap)` over the sum (0 or None: none).

    That is FlashInfer's order. slopes: [num_q_heads], `score + slope[h] * (kv_idx - q_idx)`.
    """
    parts = []
    if alibi_slopes is not None:
        element = tensor_type("alibi_slopes", alibi_slopes)
        parts.append(TracedVariant(_alibi_spec(element), (alibi_slopes,)))
    if soft_cap:
        parts.append(TracedVariant(_SOFT_CAP, (), (float(soft_cap),)))
    return compose(*parts)


@functools.cache
def _alibi_spec(element: str) -> VariantSpec:
    return VariantSpec("score + alibi_slopes(h) * to_float(kv_idx - q_idx)", tensors=(("alibi_slopes", element, 1),))


# 1 / cap does not depend on the token: compilers take it out of the loops.
_SOFT_CAP = VariantSpec("soft_cap * tanh(score * (1.0f / soft_cap))", scalars=(("soft_cap", "float"),))


def compose(*parts: TracedVariant) -> TracedVariant:
    """One variant after another: logits are chained in this order, masks must all agree."""
    parts = tuple(part for part in parts if part.spec != VariantSpec())
    if len(parts) < 2:
        return parts[0] if parts else TracedVariant()
    return TracedVariant(
        _composed_spec(*(part.spec for part in parts)),
        sum((part.tensors for part in parts), ()),
        sum((part.scalars for part in parts), ()),
    )


@functools.lru_cache(maxsize=256)
def _composed_spec(*specs: VariantSpec) -> VariantSpec:
    logit, mask, tensors, scalars = [], [], [], []
    taken: set[str] = set()
    for spec in specs:
        renamed: dict[str, str] = {}
        for name, *_ in (*spec.tensors, *spec.scalars):
            renamed[name] = unique_name(name, taken)
            taken.add(renamed[name])

        def rename(text: str, renamed: dict[str, str] = renamed) -> str:
            return _NAME.sub(lambda match: renamed.get(match[0], match[0]), text)

        logit += [rename(line) for line in spec.logit.splitlines()]
        mask += [rename(line) for line in spec.mask.splitlines()]
        tensors += [(renamed[name], element, rank) for name, element, rank in spec.tensors]
        scalars += [(renamed[name], kind) for name, kind in spec.scalars]
    return VariantSpec("\n".join(logit), "\n".join(mask), tuple(tensors), tuple(scalars))


def unique_name(name: str, taken: set[str]) -> str:
    """The name, or the name with the first free number behind it."""
    number, candidate = 1, name
    while candidate in taken:
        number += 1
        candidate = f"{name}_{number}"
    return candidate


def source_line(spec: VariantSpec, line: int) -> str:
    """The user's text that a compiler's message names as `flashpage variant:line`; "" where there is no such line."""
    lines = [*spec.logit.splitlines(), *spec.mask.splitlines()]
    return lines[line - 1] if 1 <= line <= len(lines) else ""


def render(spec: VariantSpec) -> str:
    """`struct Variant` of include/flashpage/variant.h, at any namespace level; the header and that of the lanes come before.

    Each line of `spec.logit` is one transform, each of `spec.mask` one condition. A compiler's messages name them as lines
    of the file `flashpage variant`, logits first.
    """
    logits, masks = spec.logit.splitlines(), spec.mask.splitlines()
    text = _Lines()
    text.add(
        "struct Variant {",
        f"  static constexpr bool has_logit = {str(bool(logits)).lower()};",
        f"  static constexpr bool has_mask = {str(bool(masks)).lower()};",
        "",
        "  template <class F, class I>",
        "  static FP_DEVICE F logit([[maybe_unused]] const flashpage::VariantArgs& captured, F score,",
        f"      {_PARAMETERS}) {{",
        *_captures(spec, logits),
    )
    for number, stage in enumerate(logits, 1):
        text.add("    score = F(")
        text.add_user(stage, number)
        text.add("    );")
    text.add(
        "    return score;",
        "  }",
        "",
        "  template <class I>",
        "  static FP_DEVICE auto mask([[maybe_unused]] const flashpage::VariantArgs& captured,",
        f"      {_PARAMETERS}) {{",
        *_captures(spec, masks),
        "    auto visible = flashpage::vm::as_mask(kv_idx, true);",
    )
    for number, stage in enumerate(masks, len(logits) + 1):
        text.add("    visible = flashpage::vm::logical_and(visible, flashpage::vm::as_mask(kv_idx,")
        text.add_user(stage, number)
        text.add("    ));")
    text.add("    return visible;", "  }", "};")
    return "\n".join(text.lines) + "\n"


_PARAMETERS = ", ".join(
    f"[[maybe_unused]] {kind} {name}"
    for kind, name in (("flashpage::i32", "b"), ("flashpage::i32", "h"), ("flashpage::i32", "q_idx"), ("I", "kv_idx"))
)


class _Lines:
    """Source text that knows its line numbers."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, *lines: str) -> None:
        self.lines += lines

    def add_user(self, stage: str, number: int) -> None:
        """A stage on a line of its own, so that columns in messages are columns of the user's text."""
        if re.search(r"\breturn\b", stage):
            stage = "[&]() { " + stage + " }()"
        self.add(f'#line {number} "{SOURCE_NAME}"', stage)
        self.add(f'#line {len(self.lines) + 2} "flashpage rendered variant"')


def _captures(spec: VariantSpec, stages: list[str]) -> list[str]:
    """Declarations of what the stages use. Functions by name: a global of that name (cmath's) is then not looked at."""
    used = {name for stage in stages for name in _NAME.findall(stage)}
    lines = [f"    using flashpage::vm::{name};" for name in sorted(used & FUNCTIONS)]
    for slot, (name, element, rank) in enumerate(spec.tensors):
        if name in used:
            lines.append(
                f"    [[maybe_unused]] const auto {name} = [&](auto... index) {{ "
                f'static_assert(sizeof...(index) == {rank}, "{name} has {rank} dimensions"); '
                f"return flashpage::vm::load<{_ELEMENT_CPP[element]}>(captured.tensors[{slot}], index...); }};"
            )
    for slot, (name, kind) in enumerate(spec.scalars):
        if name in used:
            cpp = _SCALAR_CPP[kind]
            lines.append(f"    const {cpp} {name} = flashpage::vm::scalar<{cpp}>(captured, {slot});")
    return lines
