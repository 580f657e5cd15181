"""Writes the Python mirrors of the structs in HEADERS, and assertions by which the compiler checks their layouts.

`python setup.py build_host` runs this before it compiles. A new struct or field is written in its header alone.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# In the order in which they include each other: the type of a field is declared above it.
HEADERS = (
    "include/flashpage/common/math.h",
    "include/flashpage/plan/work_item.h",
    "include/flashpage/plan/schedule.h",
    "include/flashpage/plan/visible.h",
    "include/flashpage/params/params.h",
    "include/flashpage/params/block_params.h",
    "csrc/flashpage.h",
    "csrc/plan_call.h",
)
SOURCES = (*HEADERS, "csrc/abi_structs.py")  # the Python mirrors follow from these
SCALARS = {"char": "c_char", "float": "c_float", "double": "c_double"}
SCALARS |= {"u8": "c_uint8", "u16": "c_uint16", "u32": "c_uint32", "u64": "c_uint64"}
SCALARS |= {"i8": "c_int8", "i16": "c_int16", "i32": "c_int32", "i64": "c_int64"}
SCALARS |= {"int32_t": "c_int32", "int64_t": "c_int64"}
# flashpage.kernels.work.Problem and flashpage.plan.batch.Batch are other classes.
ALIASES = {"fp_problem": "ProblemStruct", "fp_batch": "BatchStruct"}

STRUCT = re.compile(r"struct\s+(?:alignas\(\d+\)\s+)?(\w+)\s*\{")
NAMESPACE = re.compile(r"^namespace ([\w:]+) \{", re.MULTILINE)
FORWARD_DECLARATION = re.compile(r"struct\s+\w+\s*;")
NO_FIELD = re.compile(r"static\s+constexpr\s|FP_HOST_DEVICE\s")  # a constant, or a member function
FUNCTION_POINTER = re.compile(r"[\w:\s*]+\(\s*\*\s*(\w+)\s*\)\s*\([^()]*\)")
POINTER = re.compile(r"(?:const\s+)?[\w:]+(?:\s*\*)+\s*(\w+)")
VALUES = re.compile(r"(?:\w+::)*(\w+)\s+(\w[^*]*)")
DECLARATOR = re.compile(r"(\w+)\s*(?:\[\s*(\d+)\s*\])?")


class UnreadableError(Exception):
    """A declaration that has no Python mirror; the message names its place."""


class Struct(NamedTuple):
    c_name: str
    python_name: str
    header: str
    fields: list[tuple[str, str]]  # name and Python type


def read_structs(text: str, header: str, known: dict[str, Struct]) -> None:
    """Adds all structs of a header to `known`, by their C names without namespace."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", lambda comment: re.sub(r"[^\n]", " ", comment[0]), text, flags=re.DOTALL)
    for keyword in re.finditer(r"\b(struct|union)\b", text):
        start = keyword.start()
        if FORWARD_DECLARATION.match(text, start):
            continue
        place = f"{header}:{text.count(chr(10), 0, start) + 1}"
        declared = STRUCT.match(text, start)
        if declared is None:
            line = text[start:].splitlines()[0]
            raise UnreadableError(f"{place}: `{line}` is no plain struct: write `struct Name {{`, without base")
        name = declared[1]
        if name in known:
            raise UnreadableError(f"{place}: {name} is also declared in {known[name].header}: rename one of them")
        body = text[declared.end() : _closing_brace(text, declared.end())]
        first_line = text.count("\n", 0, declared.end()) + 1
        fields: list[tuple[str, str]] = []
        for line, statement in _statements(body, first_line):
            fields += _fields_of(statement, f"{header}:{line}", known)
        namespace = NAMESPACE.search(text)
        qualified = f"{namespace[1]}::{name}" if namespace else name
        known[name] = Struct(qualified, _python_name(name), header, fields)


def _python_name(c_name: str) -> str:
    words = c_name.removeprefix("fp_").split("_")
    return ALIASES.get(c_name) or "".join(word[0].upper() + word[1:] for word in words)


def _closing_brace(text: str, start: int) -> int:
    depth = 1
    for brace in re.finditer(r"[{}]", text[start:]):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return start + brace.start()
    return len(text)


def _statements(body: str, first_line: int) -> Iterator[tuple[int, str]]:
    """Line and text of each declaration; a function's body becomes the end of its declaration."""
    while inner := re.search(r"\{[^{}]*\}", body):
        body = body[: inner.start()] + ";" + "\n" * inner[0].count("\n") + body[inner.end() :]
    for match in re.finditer(r"[^;\s][^;]*", body):
        yield first_line + body.count("\n", 0, match.start()), " ".join(match[0].split())


def _fields_of(statement: str, place: str, known: dict[str, Struct]) -> list[tuple[str, str]]:
    if NO_FIELD.match(statement):
        return []
    if pointer := FUNCTION_POINTER.fullmatch(statement) or POINTER.fullmatch(statement):
        return [(pointer[1], "c_void_p")]
    if values := VALUES.fullmatch(statement):
        kind = known[values[1]].python_name if values[1] in known else SCALARS.get(values[1])
        names = [DECLARATOR.fullmatch(declarator) for declarator in values[2].split(", ")]
        if kind and all(names):
            return [(name[1], f"{kind} * {name[2]}" if name[2] else kind) for name in names if name]
    raise UnreadableError(
        f"{place}: `{statement};` has no Python mirror: declare one pointer, or scalars, structs from above or arrays"
    )


def python_module(structs: list[Struct], fingerprint: str) -> str:
    """The text of flashpage/native/structs.py."""
    title = f"Structs of the C ABI. Written by {SOURCES[-1]}: edit the headers and run `python setup.py build_host`."
    kinds = ", ".join(sorted({*SCALARS.values(), "c_void_p"}))
    lines = [f'"""{title}"""', "", f"from ctypes import Structure, {kinds}", ""]
    lines += [f"SOURCES = {SOURCES}", f'FINGERPRINT = "{fingerprint}"']
    lines += [f"__all__ = {[struct.python_name for struct in structs]}"]
    for struct in structs:
        lines += ["", "", f"class {struct.python_name}(Structure):  # {struct.c_name}, {struct.header}"]
        lines += ["    __slots__ = ()", "    _fields_ = ["]
        lines += [f'        ("{name}", {kind}),' for name, kind in struct.fields]
        lines += ["    ]"]
    return "\n".join(lines) + "\n"


def assertions(structs: list[Struct], module: str, fingerprint: str) -> str:
    """The text of a C++ header: the fingerprint, and every size and offset as ctypes computes them."""
    mirrors: dict[str, type[ctypes.Structure]] = {}
    exec(module, mirrors)
    lines = ["#pragma once", "#include <cstddef>", '#include "plan_call.h"']
    lines += [f'#define FP_ABI_FINGERPRINT "{fingerprint}"']
    for struct in structs:
        mirror, name = mirrors[struct.python_name], struct.c_name
        lines += [f"static_assert(sizeof({name}) == {ctypes.sizeof(mirror)});"]
        for field, _ in struct.fields:
            place = getattr(mirror, field)
            same_place = f"offsetof({name}, {field}) == {place.offset} && sizeof({name}::{field}) == {place.size}"
            lines += [f"static_assert({same_place});"]
    return "\n".join(lines) + "\n"


def generate(root: Path, fingerprint: str) -> tuple[str, str]:
    """The Python module and the C++ header for the tree at `root`."""
    known: dict[str, Struct] = {}
    for header in HEADERS:
        read_structs((root / header).read_text(), header, known)
    structs = list(known.values())
    module = python_module(structs, fingerprint)
    return module, assertions(structs, module, fingerprint)
