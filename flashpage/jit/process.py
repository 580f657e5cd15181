"""Runs compilers as child processes: how many at a time, each to its end, and none that outlives this process."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import IO

from ..base import env

_BYTES_PER_JOB = 1 << 30  # a compiler of one attention kernel stays below this
_GRACE_SECONDS = 3.0
# Variables by which debuggers and profilers get into all child processes. Names with NV_ are no sign of one, because
# CUDA's container images set NV_CUDA_*.
_TOOLS = ("LD_PRELOAD", "LD_AUDIT", "CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH")
_TOOL_PREFIXES = ("NV_TPS_", "NV_SANITIZER_", "NV_NSIGHT_", "NSYS_", "QUADD_")
_children: set[subprocess.Popen[str]] = set()  # that `running` waits for, in all threads
_is_stopped = threading.Event()
_SUPERVISOR = str(Path(__file__).with_name("supervise.py"))


def job_count(num_kernels: int) -> int:
    """Number of compilers that run at once: FLASHPAGE_JOBS, or as many as cores and free memory allow."""
    if (jobs := env.count("FLASHPAGE_JOBS")) is not None:
        return jobs
    return max(1, min(num_kernels, len(os.sched_getaffinity(0)), free_memory() // _BYTES_PER_JOB))


def free_memory() -> int:
    """Bytes that this process may still take: free on the machine, or in its container if that is less."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    with contextlib.suppress(OSError, ValueError):  # a file says "max" if there is no limit
        group = Path("/sys/fs/cgroup")
        free = min(free, int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    return free


def is_watched() -> bool:
    """Whether a library of a tool (compute-sanitizer, nsys) may be loaded into child processes.

    Such a library finds its tool through files in TMPDIR, and may leave processes that hold the pipes of the command.
    """
    return any(value and (name in _TOOLS or name.startswith(_TOOL_PREFIXES)) for name, value in os.environ.items())


def ninja_program() -> str | None:
    """The ninja package's binary, else one on PATH. None below a tool: ninja waits for the end of its pipes."""
    if is_watched():
        return None
    with contextlib.suppress(ImportError):
        import ninja

        program = os.path.join(ninja.BIN_DIR, "ninja")
        if os.access(program, os.X_OK):
            return program
    return shutil.which("ninja")


@contextlib.contextmanager
def running(
    command: list[str], folder: Path, stdout: IO[str] | int, environment: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A command in a process group of its own, waited for at the end. Whatever interrupts the block ends the whole
    group, and so does the death of this process, which also removes `folder` (supervise.py).

    Its errors go to `stdout` too, and its temporary files to `folder`. Below a tool (`is_watched`), the command is
    started as it is: it keeps TMPDIR, and it outlives a process that is killed.
    """
    own = {"LC_ALL": "C"}  # errors are read, so not translated
    if not is_watched():
        own["TMPDIR"] = str(folder)
    child = None
    try:
        fail_if_stopped()
        with _interrupts_later():  # until `child` says which process to end
            child = subprocess.Popen(
                [*_supervised(folder), *command],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=subprocess.STDOUT,
                env=os.environ | own | (environment or {}),
                start_new_session=True,
                text=True,
                errors="surrogateescape",  # paths are in no encoding that is known
            )
        _children.add(child)
        fail_if_stopped()  # after the line above: `stopped` has not seen this child, or ends it
        yield child
        child.wait()
        fail_if_stopped()  # it was ended, and has not failed
    except BaseException:
        if child is not None:
            _end(child)
        raise
    finally:
        if child is not None:
            _children.discard(child)
            if child.stdout is not None:
                child.stdout.close()


@contextlib.contextmanager
def stopped() -> Iterator[None]:
    """In the block compiles of other threads end, and none begins. For a program that was interrupted and waits for its
    threads, because the interrupt comes to the main thread alone."""
    _is_stopped.set()
    try:
        children = list(_children)
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGTERM)
        for child in children:
            _end(child)
        yield
    finally:
        _is_stopped.clear()


def fail_if_stopped() -> None:
    """InterruptedError in the block of `stopped`."""
    if _is_stopped.is_set():
        raise InterruptedError(errno.EINTR, "the program was interrupted")


def _supervised(folder: Path) -> list[str]:
    """The words before a command that make it end with this process. Empty if Python is embedded in another program, or
    below a tool."""
    if is_watched() or not sys.executable:
        return []
    return [sys.executable, "-I", "-S", _SUPERVISOR, str(os.getpid()), str(folder)]


@contextlib.contextmanager
def _interrupts_later() -> Iterator[None]:
    """Delays a SIGINT to the end of the block. Only the main thread gets signals."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    came: list[FrameType | None] = []
    signal.signal(signal.SIGINT, lambda _, frame: came.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            handler(signal.SIGINT, came[0])


def _end(child: subprocess.Popen[str]) -> None:
    """SIGTERM first: ninja passes it on to its compilers, and g++ removes its temporary files."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if child.returncode is not None:  # a thread has waited for it: the number may be another process's
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_GRACE_SECONDS)
            return
