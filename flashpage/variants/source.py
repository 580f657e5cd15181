"""Turns a VariantSpec into C++: the names and types that it may have, and `struct Variant` (params/variant.h)."""

from __future__ import annotations

import re

from ..base.dtypes import DType
from .spec import VariantSpec, logit_loads_by_token

# Compilers' messages about a user's text name the file "flashpage variant: logit" (or mask) and the line in the spec.
SOURCE_NAME = "flashpage variant: "

ARGUMENTS = ("score", "b", "h", "q_idx", "kv_idx")
# Functions of include/flashpage/params/variant.h that expressions may call.
FUNCTIONS = frozenset(
    """
    to_float to_int to_bool div floor_div mod select min max abs exp log tanh sigmoid sqrt floor infinity
    logical_and logical_or logical_xor logical_not
    """.split()  # noqa: SIM905
)
_KEYWORDS = frozenset(
    """
    alignas alignof and asm auto bitand bitor bool break case catch char class co_await co_return co_yield compl
    concept const consteval constexpr constinit continue decltype default delete do double else enum explicit
    export extern false float for friend goto if inline int long mutable namespace new noexcept not nullptr
    operator or private protected public register requires return short signed sizeof static struct switch
    template this throw true try typedef typeid typename union unsigned using virtual void volatile wchar_t
    while xor F I Variant flashpage captured visible index
    """.split()  # noqa: SIM905
)
ELEMENT_CPP = {d.value: d.cpp for d in DType.elements() if not d.is_fp8} | {
    "int8": "flashpage::i8",
    "uint8": "flashpage::u8",
    "int16": "flashpage::i16",
    "int32": "flashpage::i32",
    "int64": "flashpage::i64",
    "bool": "bool",
}
_SCALAR_CPP = {"float": "float", "int": "flashpage::i32"}
NAME = re.compile(r"(?<![\w.])[A-Za-z_]\w*")
_RETURN = re.compile(r"\breturn\b")
_TRACED_RESULT = re.compile(r"(?:const auto v\d+ = [^;]*; )+return ([^;]*);")  # the form that trace.py writes
_NUMBER = r"[A-Za-z_]\w*|[\d.]+f?"
_SOFT_CAP = re.compile(
    rf"(?:(?P<before>{_NUMBER})\*)?tanh\(\(?score(?:/(?P<divisor>{_NUMBER})|\*\(1\.0f/(?P<inverse>{_NUMBER})\))\)?\)"
    rf"(?:\*(?P<after>{_NUMBER}))?"
)
_CAUSAL = ("kv_idx <= q_idx", "q_idx >= kv_idx", "kv_idx < q_idx", "q_idx > kv_idx")
_PARAMETERS = (
    "[[maybe_unused]] flashpage::i32 b, [[maybe_unused]] flashpage::i32 h, [[maybe_unused]] flashpage::i32 q_idx,"
    " [[maybe_unused]] I kv_idx"
)


def is_free_name(name: str) -> bool:
    """Whether a captured value may have this name in C++."""
    taken = name in FUNCTIONS or name in _KEYWORDS or name in ARGUMENTS or "__" in name or name.startswith("FP_")
    return not taken and name.isascii() and name.isidentifier()


def unique_name(name: str, taken: set[str]) -> str:
    """The name, if needed with the first unused number appended; it is taken from then on."""
    number, candidate = 1, name
    while candidate in taken:
        number += 1
        candidate = f"{name}_{number}"
    taken.add(candidate)
    return candidate


def has_return(text: str) -> bool:
    """Whether a stage consists of statements that end in a return, rather than an expression."""
    return _RETURN.search(text) is not None


def mask_looks_at_head(spec: VariantSpec) -> bool:
    """Whether query heads may see different tokens."""
    return "h" in _names([spec.mask])


def takes_many_registers(spec: VariantSpec) -> bool:
    """Whether evaluating the mask function takes many registers: with three tensors, kernels with the largest tiles
    spill."""
    return mask_looks_at_head(spec) or len({name for name, _, _ in spec.tensors} & _names([spec.mask])) > 2


def mask_is_causal(spec: VariantSpec) -> bool:
    """Whether the mask's text states explicitly that no row sees a token after its own position."""
    return any(part in _CAUSAL for line in spec.mask.splitlines() for part in _conditions(line))


def soft_cap(spec: VariantSpec) -> str:
    """The cap if logit's last stage is cap * tanh(score / cap), in the form of traces or of users; otherwise empty."""
    stage = spec.logit.rpartition("\n")[2].replace(" ", "")
    if (match := _SOFT_CAP.fullmatch(stage)) is None:
        return ""
    caps = [cap for cap in match.groups() if cap]
    is_known = not NAME.fullmatch(caps[0]) or caps[0] in {name for name, _ in spec.scalars}
    return caps[0] if len(caps) == 2 and caps[0] == caps[1] and is_known else ""


def _conditions(text: str) -> list[str]:
    """The parts of an expression that must all hold."""
    if (result := _TRACED_RESULT.fullmatch(text)) is not None:
        text = result[1]
    inner, depth, cut = text.strip(), 0, 0
    if not inner.endswith(")") or not inner.startswith(("(", "logical_and(")):
        return [inner]
    first = inner.index("(") + 1
    for place in range(first, len(inner) - 1):
        depth += {"(": 1, ")": -1}.get(inner[place], 0)
        if depth < 0:
            return [inner]  # the first bracket is not closed by the last one
        if depth == 0 and inner[place] == ",":
            cut = place
    if first == 1:
        return _conditions(inner[1:-1])
    return [*_conditions(inner[first:cut]), *_conditions(inner[cut + 1 : -1])]


def render(spec: VariantSpec) -> str:
    """Renders `struct Variant` for any namespace level; variant.h (on the CPU also the lanes' header) must be included
    before.

    Each line of `spec.logit` is a transform, and they are applied in order; each line of `spec.mask` is a condition,
    and all must hold.
    """
    logits, masks, cap = spec.logit.splitlines(), spec.mask.splitlines(), soft_cap(spec)
    text = _Lines()
    text.add(
        "struct Variant {",
        f"  static constexpr bool has_logit = {str(bool(logits)).lower()};",
        f"  static constexpr bool has_mask = {str(bool(masks)).lower()};",
        f"  static constexpr bool mask_has_head = {str(mask_looks_at_head(spec)).lower()};",
        f"  static constexpr bool mask_is_causal = {str(mask_is_causal(spec)).lower()};",
        f"  static constexpr bool logit_loads_by_token = {str(logit_loads_by_token(spec)).lower()};",
        f"  static constexpr bool ends_in_soft_cap = {str(bool(cap)).lower()};",
        f"  static constexpr bool only_soft_cap = {str(bool(cap) and len(logits) == 1).lower()};",
        "",
    )
    if cap:
        text.add("  static FP_DEVICE float soft_cap([[maybe_unused]] const flashpage::VariantArgs& captured) {")
        text.add(*_captures(spec, [cap]), f"    return {cap};", "  }", "")
        _add_logit(text, spec, "before_soft_cap", len(logits) - 1)
    _add_logit(text, spec, "logit", len(logits))
    text.add(
        "  template <class I>",
        "  static FP_DEVICE auto mask([[maybe_unused]] const flashpage::VariantArgs& captured,",
        f"                             {_PARAMETERS}) {{",
        *_captures(spec, masks),
        "    auto visible = flashpage::vm::as_mask(kv_idx, true);",
    )
    for number, stage in enumerate(masks, 1):
        text.add("    visible = flashpage::vm::logical_and(visible, flashpage::vm::as_mask(kv_idx,")
        text.add_stage("mask", number, stage, "    ));")
    text.add("    return visible;", "  }", "};")
    return "\n".join(text.lines) + "\n"


def _add_logit(text: _Lines, spec: VariantSpec, name: str, count: int) -> None:
    """Adds a function of the first `count` stages."""
    stages = spec.logit.splitlines()[:count]
    text.add(
        "  template <class F, class I>",
        f"  static FP_DEVICE F {name}([[maybe_unused]] const flashpage::VariantArgs& captured, F score,",
        f"                           {_PARAMETERS}) {{",
        *_captures(spec, stages),
    )
    for number, stage in enumerate(stages, 1):
        text.add("    score = F(")
        text.add_stage("logit", number, stage, "    );")
    text.add("    return score;", "  }", "")


class _Lines:
    """Source text that counts its lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, *lines: str) -> None:
        self.lines += lines

    def add_stage(self, part: str, number: int, stage: str, closing: str) -> None:
        """Adds a user's text on a line of its own. The closing text gets the same line number, because compilers report
        a missing end there."""
        if has_return(stage):
            stage = "[&]() { " + stage + " }()"
        where = f'#line {number} "{SOURCE_NAME}{part}"'
        self.add(where, stage, where, closing)
        self.add(f'#line {len(self.lines) + 2} "flashpage rendered variant"')


def _names(stages: list[str]) -> set[str]:
    return {name for stage in stages for name in NAME.findall(stage)}


def _captures(spec: VariantSpec, stages: list[str]) -> list[str]:
    """Declares the captured values that the stages use. Functions are qualified by name, so that globals of the same
    name (cmath's) are not considered."""
    used = _names(stages)
    lines = [f"    using flashpage::vm::{name};" for name in sorted(used & FUNCTIONS)]
    for slot, (name, element, rank) in enumerate(spec.tensors):
        if name in used:
            lines += [
                f"    const auto {name} = [&](auto... index) {{",
                f'      static_assert(sizeof...(index) == {rank}, "the number of dimensions of {name} is {rank}");',
                f"      return flashpage::vm::load<{ELEMENT_CPP[element]}>(captured.tensors[{slot}], index...);",
                "    };",
            ]
    for slot, (name, kind) in enumerate(spec.scalars):
        if name in used:
            cpp = _SCALAR_CPP[kind]
            lines.append(f"    const {cpp} {name} = flashpage::vm::scalar<{cpp}>(captured, {slot});")
    return lines
