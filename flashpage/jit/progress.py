"""Shows the progress of long work: a line before and after a compile, a bar for many. FLASHPAGE_PROGRESS=off:
nothing on stderr. A logger that is routed (base/log.py) gets the lines instead."""

from __future__ import annotations

import contextlib
import sys
import time

from ..base import env
from ..base.log import LOGGER, is_routed

_BAR_CELLS = 30


def say(text: str) -> None:
    """Writes one line to the log if it is routed, otherwise to stderr."""
    if is_routed():
        LOGGER.info(text)
    elif not env.is_off("FLASHPAGE_PROGRESS"):
        _write(f"flashpage: {text}\n")


def _write(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # a broken pipe or a closed file must not end a compile
        if sys.stderr is not None:  # daemons and windows have none
            sys.stderr.write(text)
            sys.stderr.flush()


def _is_terminal() -> bool:
    with contextlib.suppress(ValueError):
        return sys.stderr is not None and sys.stderr.isatty()
    return False


class Bar:
    """Progress of `total` steps: redrawn in place on a terminal, otherwise only its last line."""

    def __init__(self, total: int, what: str) -> None:
        self._total, self._done, self._failed, self._what = total, 0, 0, what
        self._start = time.monotonic()
        self._is_shown = not env.is_off("FLASHPAGE_PROGRESS")
        self._is_redrawn = _is_terminal()
        self._draw("")

    def advance(self, name: str, *, failed: bool = False) -> None:
        """Counts one more step as done."""
        self._done += 1
        self._failed += failed
        self._draw(name)

    def close(self) -> None:
        if self._is_shown and self._is_redrawn:
            _write("\r\033[K")
        failed = f", {self._failed} failed" if self._failed else ""
        seconds = time.monotonic() - self._start
        say(f"{self._what}: {self._done - self._failed} of {self._total} in {seconds:.1f} s{failed}")

    def _draw(self, name: str) -> None:
        if self._is_shown and self._is_redrawn:
            filled = _BAR_CELLS * self._done // max(self._total, 1)
            bar = "█" * filled + "░" * (_BAR_CELLS - filled)
            _write(f"\r\033[K{self._what} {bar} {self._done}/{self._total} {name[:60]}")
