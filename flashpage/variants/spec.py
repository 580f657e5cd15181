"""VariantSpec: the part of a variant that is compiled into a kernel."""

from __future__ import annotations

import dataclasses
import re


@dataclasses.dataclass(frozen=True)
class VariantSpec:
    """The source of a logit transform and a mask, and the values they capture (made by variants/variant.py).

    `logit` and `mask` are C++ expressions (or statements ending in a return) over `score, b, h, q_idx, kv_idx` and the
    captured names; empty: identity, all visible. Values change from run to run; names, types and ranks are compiled in.
    """

    logit: str = ""
    mask: str = ""
    tensors: tuple[tuple[str, str, int], ...] = ()  # (name, DType.value or "int32" | "int64" | "bool", rank)
    scalars: tuple[tuple[str, str], ...] = ()  # (name, "float" | "int")


def logit_loads_by_token(variant: VariantSpec) -> bool:
    """Whether `logit` loads different elements for different kv_idx. True for statements that load, because they are
    not analysed."""
    tensors = {name for name, _, _ in variant.tensors}
    of_row = {"b", "h", "q_idx", *tensors, *(name for name, _ in variant.scalars)}
    if tensors and ";" in variant.logit:
        return True
    for name in re.finditer(r"[A-Za-z_]\w*", variant.logit):
        if name[0] in tensors and not _names(_arguments(variant.logit[name.end() :].lstrip())) <= of_row:
            return True
    return False


def _names(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w.])[A-Za-z_]\w*", text))


def _arguments(text: str) -> str:
    """The text inside the bracket with which `text` begins; all of `text` if the bracket is not closed."""
    depth = 0
    for place, character in enumerate(text):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth == 0 and character == ")":
            return text[:place]
    return text
