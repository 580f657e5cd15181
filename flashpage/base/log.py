"""The logger "flashpage": compile lines, choices of kernels, warnings, and the calls that FLASHPAGE_LOG asks to see."""

from __future__ import annotations

import logging
import sys

LOGGER = logging.getLogger("flashpage")


class _Stderr(logging.Handler):
    """Writes records to stderr, as long as the program has no handlers of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.root.handlers and len(LOGGER.handlers) == 1 and sys.stderr is not None:
            sys.stderr.write(f"flashpage: {record.getMessage()}\n")


def is_routed() -> bool:
    """Whether a handler shows records of level INFO; lines for a person then go there, and not to stderr."""
    return LOGGER.isEnabledFor(logging.INFO) and LOGGER.hasHandlers()


def show() -> None:
    """Shows records of level INFO, on stderr if the program routes them nowhere."""
    if LOGGER.level == logging.NOTSET:
        LOGGER.setLevel(logging.INFO)
    if not any(isinstance(handler, _Stderr) for handler in LOGGER.handlers):
        LOGGER.addHandler(_Stderr())
