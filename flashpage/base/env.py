"""The environment variables that flashpage reads: these eight and no others. Read at first use, never at import."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLES = {
    "FLASHPAGE_CACHE_DIR": "folder of compiled kernels (default: $XDG_CACHE_HOME/flashpage, else ~/.cache/flashpage)",
    "FLASHPAGE_JIT": "'off': a kernel that is not built is an error that names the command that builds it",
    "FLASHPAGE_PROGRESS": "'off': no line before and after a compile, no progress bar",
    "FLASHPAGE_JOBS": "compilers that run side by side (default: bounded by cores and memory)",
    "FLASHPAGE_CXX": "C++ compiler of the CPU backend (default: g++)",
    "FLASHPAGE_NVCC": "nvcc to use; 'off': use NVRTC even where nvcc is found",
    "FLASHPAGE_THREADS": "threads of the CPU backend (default: the cores this process may use)",
    "FLASHPAGE_CHECK_INDICES": "'on': plan checks page numbers and item lengths that live on the device (copies back)",
}


def get(name: str) -> str:
    """The variable's value, "" where unset."""
    assert name in VARIABLES, name
    return os.environ.get(name, "")


def is_off(name: str) -> bool:
    return get(name).lower() in ("off", "0", "false", "no")


def is_on(name: str) -> bool:
    return get(name).lower() in ("on", "1", "true", "yes")


def cache_dir() -> Path:
    """The folder of compiled kernels; not created here."""
    if folder := get("FLASHPAGE_CACHE_DIR"):
        return Path(folder).absolute()
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "flashpage"
