"""Runs rows of the table in child processes, which a row may crash.

`python -m bad_inputs.child DEVICE FAMILY [PATTERN]` prints a JSON object: the number of rows, and for each row with a
wrong outcome its name and a complaint.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import resource
import select
import signal
import sys
import warnings

import torch

from flashpage.base.errors import FlashpageError

from .rows import Row, good_arguments, judge, table
from .scene import Make, Scene

SECONDS = 20  # for one row
COMPILE_SECONDS = 120  # for the kernels of a scene, also while other processes compile
COMPILES = b"null\n"  # the line that says that a scene's kernels are compiled next
MEMORY = 24 << 30  # bytes of address space: allocating a huge size raises MemoryError and does not fill the machine


def _work(rows: list[Row], first: int, device: str, pipe: int) -> None:
    """The child process: writes one JSON line to `pipe` for each row from `first` on."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    _start_group()
    if device == "cpu":
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    make, baselines = Make(device), {}
    for i in range(first, len(rows)):
        scene = rows[i].scene
        if scene.name not in baselines:
            os.environ.pop("FLASHPAGE_JIT", None)
            os.write(pipe, COMPILES)
            try:
                baselines[scene.name] = scene.run(good_arguments(scene, make))[1]
                _compile_for_masks(scene, make)
            except Exception as error:
                baselines[scene.name] = error
            os.environ["FLASHPAGE_JIT"] = "off"  # accepted arguments that need another kernel would compile it
        baseline = baselines[scene.name]
        if isinstance(baseline, Exception):
            complaint = f"the good arguments are refused: {baseline}"
        else:
            complaint = judge(rows[i], make, baseline)
        if device != "cpu":
            complaint = _judge_card(complaint)
        os.write(pipe, json.dumps([i, complaint]).encode() + b"\n")
        if complaint is not None and complaint.startswith("the card"):
            os._exit(0)  # the CUDA context is lost; the parent starts another child
    os._exit(0)


def _compile_for_masks(scene: Scene, make: Make) -> None:
    """Compiles the kernels that masks need. A mask is checked after its kernel is found, so rows with bad masks would
    otherwise end in another error if the cache is empty."""
    for i, step in enumerate(scene.steps):
        for name, value in step.optional(make).items():
            if "mask" in name:
                given = good_arguments(scene, make)
                given[i][name] = value
                with contextlib.suppress(FlashpageError):  # the row `good` of the mask reports it
                    scene.run(given)


def _start_group() -> None:
    """Starts a process group of one rank, which flashpage.parallel needs."""
    import torch.distributed as dist

    if dist.is_available():
        dist.init_process_group("gloo", store=dist.HashStore(), world_size=1, rank=0)


def _judge_card(complaint: str | None) -> str | None:
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return f"the card: {str(error).splitlines()[0]}"
    return complaint


def verdicts(rows: list[Row], device: str) -> dict[str, str]:
    """Complaints about the rows with a wrong outcome, by name. After a crash a new child runs the rows that follow."""
    found: dict[str, str] = {}
    first = 0
    while first < len(rows):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            _work(rows, first, device, write)
        os.close(write)
        last, timed_out = _read(read, found, rows, first)
        if timed_out:
            os.kill(pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if last + 1 < len(rows) and not (status == 0 and last >= first):
            too_long = f"took more than {SECONDS} s, or its scene's kernels {COMPILE_SECONDS} s"
            reason = too_long if timed_out else f"ended the process with status {status}"
            found[rows[last + 1].name] = reason
            print(rows[last + 1].name, reason, file=sys.stderr, flush=True)
            last += 1
        first = last + 1
    return found


def _read(pipe: int, found: dict[str, str], rows: list[Row], first: int) -> tuple[int, bool]:
    """Reads complaints into `found`; returns the last finished row and whether the next one took too long."""
    last, rest, seconds = first - 1, b"", SECONDS
    while True:
        if not select.select([pipe], [], [], seconds)[0]:
            os.close(pipe)
            return last, True
        data = os.read(pipe, 1 << 16)
        if not data:
            os.close(pipe)
            return last, False
        *lines, rest = (rest + data).split(b"\n")
        seconds = COMPILE_SECONDS if data.endswith(COMPILES) else SECONDS
        for line in lines:
            if line == COMPILES.strip():
                continue
            last, complaint = json.loads(line)
            if complaint is not None:
                found[rows[last].name] = complaint


def main() -> None:
    device, family, *pattern = sys.argv[1:]
    rows = [row for row in table(device, family) if not pattern or fnmatch.fnmatchcase(row.name, pattern[0])]
    print(json.dumps({"rows": len(rows), "wrong": verdicts(rows, device)}))


if __name__ == "__main__":
    main()
