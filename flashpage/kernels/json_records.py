"""JSON records that came from a file, checked field by field before anything is made of them.

A spec's fields become C++ and flags of compilers, so each has its own list of what it may be. The source of a variant
is code: its length alone is judged (docs/security.md). A ValueError names the field, its value and what is accepted.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from ..variants.source import ELEMENT_CPP, is_free_name

Judge = Callable[[str, Any], Any]  # the field's place and value -> what the record holds

MAX_SOURCE = 1 << 16  # characters of a variant's logit or mask
MAX_VALUES = 256  # captured by a variant
_MAX_NAME = 128
_KERNEL_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
_short = reprlib.Repr()
_short.maxstring = _short.maxother = 60


def refuse(place: str, value: Any, accepted: str) -> ValueError:
    return ValueError(f"{place} is {_shown(value)}: give {accepted}")


def _shown(value: Any) -> str:
    return _short.repr(value)[:80]


def number(least: int, most: int) -> Judge:
    def judge(place: str, value: Any) -> int:
        if type(value) is not int or not least <= value <= most:
            raise refuse(place, value, f"a whole number from {least} to {most}")
        return value

    return judge


def choice(*values: str) -> Judge:
    def judge(place: str, value: Any) -> str:
        if not isinstance(value, str) or value not in values:
            raise refuse(place, value, f"one of {', '.join(map(repr, values))}")
        return value

    return judge


def flag(place: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise refuse(place, value, "true or false")
    return value


def source(place: str, value: Any) -> str:
    is_text = isinstance(value, str) and len(value) <= MAX_SOURCE
    if not is_text or not value.translate({ord("\n"): None, ord("\t"): None}).isprintable():
        raise refuse(place, value, f"a text of at most {MAX_SOURCE} printable characters")
    return value


def kernel_name(place: str, value: Any) -> str:
    if not isinstance(value, str) or not _KERNEL_NAME.fullmatch(value):
        raise refuse(place, value, "the name of a kernel")
    return value


def record(place: str, data: Any, fields: Mapping[str, Judge], needed: frozenset[str] = frozenset()) -> dict[str, Any]:
    """The judged fields of an object that has no others, and those that it needs."""
    if not isinstance(data, dict):
        raise refuse(place, data, "an object")
    for name in data:
        if name not in fields:
            raise ValueError(f"{place} has a field {_shown(name)}: it may have {', '.join(fields)}")
    if missing := sorted(needed - set(data)):
        raise ValueError(f"{place} has no field {missing[0]}: it needs {', '.join(sorted(needed))}")
    return {name: fields[name](f"{place}.{name}", value) for name, value in data.items()}


def captured(*kinds: Judge) -> Judge:
    """A list of values that a variant captures: a name each, and then these."""

    def name(place: str, value: Any) -> str:
        if not isinstance(value, str) or len(value) > _MAX_NAME or not is_free_name(value):
            raise refuse(place, value, "a name that C++ and the variant do not use")
        return value

    def judge(place: str, value: Any) -> tuple[tuple[Any, ...], ...]:
        if not isinstance(value, list | tuple) or len(value) > MAX_VALUES:
            raise refuse(place, value, f"a list of at most {MAX_VALUES}")
        found = []
        for number, entry in enumerate(value):
            if not isinstance(entry, list | tuple) or len(entry) != 1 + len(kinds):
                raise refuse(f"{place}[{number}]", entry, f"a list of {1 + len(kinds)}")
            judges = zip((name, *kinds), entry, strict=True)
            found.append(tuple(kind(f"{place}[{number}][{i}]", part) for i, (kind, part) in enumerate(judges)))
        if len({entry[0] for entry in found}) != len(found):
            raise refuse(place, value, "names that differ")
        return tuple(found)

    return judge


TENSORS = captured(choice(*ELEMENT_CPP), number(0, 8))
SCALARS = captured(choice("float", "int"))
