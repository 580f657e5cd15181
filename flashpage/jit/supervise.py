"""A command that ends with the process that started it: `python supervise.py PARENT FOLDER COMMAND...`.

Run as a file: it imports no flashpage. The kernel sends SIGTERM when the parent dies, however that happens. Everything
that the command has started is then ended, and the compile's folder is removed. Where the parent itself sends SIGTERM,
it removes the folder.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_GRACE_SECONDS = 1.5  # less than the parent waits (process.py)


class Ended(BaseException):
    """SIGTERM came."""


def _end(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Ended


def _children() -> list[int]:
    """This process's own, and the orphans of those: it is their reaper."""
    with contextlib.suppress(OSError):
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    return []


def _end_children() -> None:
    """SIGTERM first: ninja passes it on to its compilers, and g++ removes its temporary files."""
    os.killpg(0, signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_SECONDS
    while children := _children():
        is_late = time.monotonic() > deadline
        for pid in children:
            if is_late:
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0 if is_late else os.WNOHANG)
        time.sleep(0.01)


def main(arguments: list[str]) -> int:
    parent, folder, *command = arguments
    signal.signal(signal.SIGTERM, _end)
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    try:
        if os.getppid() != int(parent):  # it died before the line above
            raise Ended
        return subprocess.Popen(command, stdin=subprocess.DEVNULL).wait()
    except Ended:
        _end_children()
        if os.getppid() != int(parent):
            shutil.rmtree(folder, ignore_errors=True)
        return 128 + signal.SIGTERM


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
