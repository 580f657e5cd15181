"""Excerpts of the log of an engine that failed: its first error, from which the later ones follow, and its end."""

from __future__ import annotations

import re

# "ValueError: ..." after what vLLM and SGLang write before a line: a rank, or a process, a time and a file.
_ERROR = re.compile(r"(^|[\s\])])[A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt)(: |$)")
_LEVELS = 15  # lines of a traceback that are shown, those that end it
_MORE = 5  # lines of a message
END = 3000  # characters


def in_short(log: str) -> str:
    """The last lines of the first traceback, if the end does not show them anyway, and the end of the log."""
    lines, end = log.splitlines(), log[-END:]
    first = next((i for i, line in enumerate(lines) if "Traceback (most recent call last)" in line), None)
    if first is not None:
        errors = (i for i in range(first + 1, len(lines)) if _ERROR.search(lines[i]))
        last = next(errors, first)
        shown = "\n".join(lines[max(first, last - _LEVELS) : last + _MORE])
        if lines[last] not in end:
            return f"its first error:\n{shown}\n\nthe end of its log:\n{end}"
    return f"the end of its log:\n{end}"
