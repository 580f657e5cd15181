"""numba for programs that only need its functions to run: each is called as it is written, in Python.

vLLM's guesses by n-grams are such functions, and numba brings a compiler of 40 MB.
"""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any


def jit(*functions: Any, **_: Any) -> Any:
    """A decorator, with or without arguments."""
    return functions[0] if functions and callable(functions[0]) else lambda function: function


njit, prange = jit, range


def get_num_threads() -> int:
    return 1


def set_num_threads(count: int) -> None:
    """Does nothing."""


def write_numba(folder: Path) -> None:
    """Makes this file `numba` for a process that has the folder on its path, unless numba is installed."""
    if importlib.util.find_spec("numba") is None:
        shutil.copy(__file__, folder / "numba.py")
