"""Reads the output of compilers: the first error with its source line, and ptxas' registers and spills."""

from __future__ import annotations

import dataclasses
import re

from ..base.errors import CompileError
from ..kernels.spec import KernelSpec
from ..variants.source import SOURCE_NAME
from .targets import Target

_TAIL_LINES = 12
_ERROR_LINES = (
    re.compile(r"^(?P<file>.+?):(?P<line>\d+):(?:\d+:)? (?:fatal )?error: (?P<message>.*)$"),  # g++, clang
    re.compile(
        r"^(?P<file>.+?)\((?P<line>\d+)\): (?:catastrophic )?error(?: #[\w-]+)?: (?P<message>.*)$"
    ),  # nvcc, NVRTC
)


@dataclasses.dataclass(frozen=True)
class Diagnostic:
    """An error that a compiler reports."""

    file: str
    line: int
    message: str
    excerpt: str  # the source line as the compiler showed it, "" if it showed none


def read_errors(log: str) -> list[Diagnostic]:
    """The errors of a log, in order."""
    lines = log.splitlines()
    found = []
    for number, text in enumerate(lines):
        match = next((m for pattern in _ERROR_LINES if (m := pattern.match(text))), None)
        if match:
            following = lines[number + 1] if number + 1 < len(lines) else ""
            excerpt = re.sub(r"^ *\d+ \| ?", "", following) if following.startswith(" ") else ""
            found.append(Diagnostic(match["file"], int(match["line"]), match["message"], excerpt.strip()))
    return found


def compile_error(spec: KernelSpec, target: Target, command: str, log: str, log_file: str) -> CompileError:
    """The error of a failed compile: first the user's own line, if it is at fault, then the first error, the kernel,
    the command and the end of the log."""
    errors = read_errors(log)
    lines = []
    if blamed := _variant_error(spec, errors, log):
        lines += [f"variant: {blamed[0]}", f"  does not compile: {blamed[1]}"]
    elif errors:
        lines += [f"{errors[0].file}, line {errors[0].line}: {errors[0].message}", f"    {errors[0].excerpt}".rstrip()]
    lines += [f"kernel {spec.name} did not compile for {target.name}; source and log: {log_file}", f"  {command}"]
    lines += [f"  | {text}" for text in log.splitlines()[-_TAIL_LINES:]]
    return CompileError("\n".join(line for line in lines if line))


def _variant_error(spec: KernelSpec, errors: list[Diagnostic], log: str) -> tuple[str, str] | None:
    """The user's line and the message, if the error is in that line or in a function that it calls."""
    for error in errors:
        if error.file.startswith(SOURCE_NAME):
            return _variant_line(spec, error.file, error.line), error.message
    # Where templates were instantiated: in g++'s form, then in that of nvcc and NVRTC.
    callers = rf'^(?P<file>{SOURCE_NAME}\w+):(?P<line>\d+):|at line (?P<line2>\d+) of "?(?P<file2>{SOURCE_NAME}\w+)'
    if errors and (caller := re.search(callers, log, re.MULTILINE)):
        file, line = caller["file"] or caller["file2"], int(caller["line"] or caller["line2"])
        return _variant_line(spec, file, line), errors[0].message
    return None


def _variant_line(spec: KernelSpec, file: str, line: int) -> str:
    """The user's text from the spec, because compilers show it with expanded macros or not at all."""
    part = {"logit": spec.variant.logit, "mask": spec.variant.mask}[file.removeprefix(SOURCE_NAME)]
    lines = part.splitlines()
    return lines[min(line, len(lines)) - 1]  # what is left open at the end is found in a later line


def read_ptxas(log: str) -> dict[str, int]:
    """registers, spill_bytes (stores and loads) and serial_products of a CUDA compile; empty where ptxas is silent.

    serial_products: how often ptxas says that it puts warpgroup products (wgmma) one after the other (C7510 to C7520).
    It has a code for each cause, and no list of them, so its words are read.
    """
    if not (registers := re.search(r"Used (\d+) registers", log)):
        return {}
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", log)
    serial = len(re.findall(r"wgmma\S* instructions are serialized", log))
    return {"registers": int(registers[1]), "spill_bytes": sum(map(int, spills)), "serial_products": serial}
