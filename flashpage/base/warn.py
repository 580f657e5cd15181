"""Warnings that point to the user's line: the first one on the call stack outside of the package."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings

from .log import LOGGER, is_routed
from .paths import PACKAGE

_SKIPPED = (str(PACKAGE) + os.sep, contextlib.__file__)


def warn(message: str, category: type[Warning] = RuntimeWarning) -> None:
    """Warns under the name of the package, and in its log if that is routed."""
    if is_routed():
        LOGGER.warning(message)
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_SKIPPED):
        level, frame = level + 1, frame.f_back
    warnings.warn(f"flashpage: {message}", category, stacklevel=level)
