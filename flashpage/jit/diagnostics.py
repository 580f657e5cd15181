"""What compilers print, read: the first error with its source line, and ptxas' registers and spills."""

from __future__ import annotations

import dataclasses
import re

from ..errors import CompileError
from ..spec import KernelSpec
from .targets import Target

# variants.render marks a user's lines with `#line N "flashpage variant: <where>"`.
VARIANT_FILE = "flashpage variant: "
_TAIL_LINES = 12
_ERROR_LINES = (
    re.compile(r"^(?P<file>.+?):(?P<line>\d+):(?:\d+:)? (?:fatal )?error: (?P<message>.*)$"),  # g++, clang
    re.compile(
        r"^(?P<file>.+?)\((?P<line>\d+)\): (?:catastrophic )?error(?: #[\w-]+)?: (?P<message>.*)$"
    ),  # nvcc, NVRTC
)


@dataclasses.dataclass(frozen=True)
class Diagnostic:
    """One error of a compiler."""

    file: str
    line: int
    message: str
    excerpt: str  # the source line as the compiler showed it, "" where it did not


def read_errors(log: str) -> list[Diagnostic]:
    """The errors of a log, in its order."""
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
    """The first error, a user's own line before all others; then the kernel, the command and the end of the log."""
    errors = read_errors(log)
    first = next((error for error in errors if error.file.startswith(VARIANT_FILE)), errors[0] if errors else None)
    lines = []
    if first is not None:
        where = f"{first.file}, line {first.line}"
        source = _variant_line(spec, first) or first.excerpt
        lines += [f"{where}: {first.message}", f"    {source}"] if source else [f"{where}: {first.message}"]
    lines += [f"kernel {spec.name} did not compile for {target.name}; source and whole log: {log_file}", f"  {command}"]
    lines += [f"  | {text}" for text in log.splitlines()[-_TAIL_LINES:]]
    return CompileError("\n".join(lines))


def _variant_line(spec: KernelSpec, error: Diagnostic) -> str:
    """The line of the user's expression, from the spec itself: compilers show it after macros and not always."""
    part = error.file.removeprefix(VARIANT_FILE)
    source = {"logit": spec.variant.logit, "mask": spec.variant.mask}.get(part, "").splitlines()
    return source[error.line - 1].strip() if error.line <= len(source) else ""


def read_ptxas(log: str) -> dict[str, int]:
    """registers and spill_bytes (stores and loads) of a CUDA compile; empty where ptxas reported nothing."""
    if not (registers := re.search(r"Used (\d+) registers", log)):
        return {}
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", log)
    return {"registers": int(registers[1]), "spill_bytes": sum(map(int, spills))}
