"""The environment variables that flashpage reads: these and no others. They are read and checked at first use;
the three of flashpage/watch, which wrap functions, when flashpage is imported."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from .errors import SettingError

VARIABLES = {
    "FLASHPAGE_CACHE_DIR": "folder of compiled kernels (default: $XDG_CACHE_HOME/flashpage, else ~/.cache/flashpage)",
    "FLASHPAGE_JIT": "'off': a kernel that is not built is an error that names the command that builds it",
    "FLASHPAGE_PROGRESS": "'off': no line before and after a compile, no progress bar",
    "FLASHPAGE_JOBS": "number of compilers that run at once (default: bounded by cores and memory)",
    "FLASHPAGE_CXX": "C++ compiler of the CPU backend (default: g++)",
    "FLASHPAGE_NVCC": "nvcc to use; 'off': use NVRTC even if nvcc is found",
    "FLASHPAGE_THREADS": "threads of the CPU backend (default: the cores this process may use)",
    "FLASHPAGE_CHECK_INDICES": "'on': plan checks page numbers and item lengths that live on the device (copies back)",
    "FLASHPAGE_CARD": "for tests: plan as for this row of the table of cards, 'RTX 4090' or 'H100:16' (with 16 SMs)",
    "FLASHPAGE_VLLM": "'on': vLLM's own choices of FLASH_ATTN, FLASHINFER, CPU_ATTN and for MLA are flashpage",
    "FLASHPAGE_SGLANG": "'on': SGLang's backend for lists of tokens (dsa: DeepSeek V3.2, GLM-5) attends by flashpage",
    "FLASHPAGE_LOG": "1: log public calls; 3: with shapes, dtypes and strides; 5: and with minima, maxima, NaN counts",
    "FLASHPAGE_DUMP": "folder that keeps the inputs of calls that fail, for `flashpage replay`",
    "FLASHPAGE_NVTX": "'on': NVTX ranges around plan and run, with the kernel's name",
}
LOG_LEVELS = (0, 1, 3, 5)
MAX_COUNT = 1024  # of threads (csrc/cpu/threads.cpp) and of compilers
_OFF = ("off", "0", "false", "no")
_ON = ("on", "1", "true", "yes")
_SHOWN = 80  # characters of a value in a message


def get(name: str) -> str:
    """The variable's value; "" if unset."""
    assert name in VARIABLES, name
    return os.environ.get(name, "")


def is_off(name: str) -> bool:
    """Whether a switch is set to off; SettingError if it is set to something that is neither on nor off."""
    return _switch(name) in _OFF


def is_on(name: str) -> bool:
    """Whether a switch is set to on; SettingError if it is set to something that is neither on nor off."""
    return _switch(name) in _ON


def _switch(name: str) -> str:
    value = get(name).lower()
    if value and value not in _OFF and value not in _ON:
        raise refused(name, f"'on' ({', '.join(_ON[1:])}) or 'off' ({', '.join(_OFF[1:])})")
    return value


def count(name: str) -> int | None:
    """A whole number of at least 1, None if unset; SettingError for anything else."""
    value = get(name)
    if not value:
        return None
    if not (value.isascii() and value.isdigit() and len(value) <= 9 and 1 <= int(value) <= MAX_COUNT):
        raise refused(name, f"a whole number from 1 to {MAX_COUNT}")
    return int(value)


def log_level() -> int:
    """The level in FLASHPAGE_LOG, 0 if unset; SettingError for any other value."""
    value = get("FLASHPAGE_LOG") or "0"
    if value not in map(str, LOG_LEVELS):
        raise refused("FLASHPAGE_LOG", f"{', '.join(map(str, LOG_LEVELS[:-1]))} or {LOG_LEVELS[-1]}")
    return int(value)


def words(name: str) -> list[str]:
    """A command and its options, [] if unset; SettingError if quotes do not match."""
    try:
        return shlex.split(get(name))
    except ValueError as error:
        raise refused(name, "a program and its options, quoted as in a shell", f" ({error})") from None


def nvcc() -> str | None:
    """The program in FLASHPAGE_NVCC: "nvcc" if unset, None if switched off."""
    value = get("FLASHPAGE_NVCC")
    return None if value.lower() in _OFF else value or "nvcc"


def cache_dir() -> Path:
    """The folder of compiled kernels; this does not create it."""
    if folder := get("FLASHPAGE_CACHE_DIR"):
        return Path(folder).absolute()
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "flashpage"


def problems() -> dict[str, str]:
    """The messages for all variables whose values are not accepted."""
    found = {}
    readers = {"FLASHPAGE_JOBS": count, "FLASHPAGE_THREADS": count, "FLASHPAGE_CXX": words}
    switches = (
        "FLASHPAGE_JIT",
        "FLASHPAGE_PROGRESS",
        "FLASHPAGE_CHECK_INDICES",
        "FLASHPAGE_VLLM",
        "FLASHPAGE_SGLANG",
        "FLASHPAGE_NVTX",
    )
    for name, read in (readers | dict.fromkeys(switches, is_on)).items():
        try:
            read(name)
        except SettingError as error:
            found[name] = str(error)
    try:
        log_level()
    except SettingError as error:
        found["FLASHPAGE_LOG"] = str(error)
    return found


def refused(name: str, accepted: str, detail: str = "") -> SettingError:
    """The error for a variable's value."""
    value = get(name)
    shown = value if len(value) <= _SHOWN else value[:_SHOWN] + "..."
    return SettingError(f"{name} is {shown!r}{detail}: give {accepted}, or leave it unset")
