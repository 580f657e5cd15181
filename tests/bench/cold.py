"""Seconds of a first call in a new process: from an empty cache, once built, and of a cached kernel alone.

A call is a wrapper's construction, plan and run, and the wait for the result. The time from an empty cache and once
built has the library's import as well; with torch it is that from the process's start on, with the imports and the
card's context. A cached kernel is timed after a call of the other kind, so that all else is loaded. Each round has an
empty folder for all caches. Peers, which may compile for minutes, run in the first round alone. A missed target stands
in parentheses. `--small --device cpu` makes one round with the host's compiler.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import operator
import os
import site
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from command_line import Parser

OWN, PEER = "flashpage", "flashinfer"
NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, PAGES, ROWS = 32, 8, 128, 16, 8, 64
KINDS = {"decode": 1.5, "prefill": 2.0}  # seconds that a first call may take on a card
CACHED_MUST = 0.01
STATES = ("from an empty cache", "once built", "a cached kernel")
CACHES = ("HOME", "XDG_CACHE_HOME", "FLASHPAGE_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE", "CUDA_CACHE_PATH")
MOST_SECONDS = 580  # of one process


class Spent(NamedTuple):
    """Seconds of one process."""

    call: float
    library: float  # its import
    whole: float  # from the process's start to the result

    def without_torch(self) -> float:
        return self.library + self.call


def make_call(kind: str, module: Any, tensors: dict[str, Any]) -> None:
    import torch

    heads = (NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE)
    indptr, last = torch.tensor([0, PAGES], dtype=torch.int32), torch.tensor([PAGE_SIZE], dtype=torch.int32)
    pages = (indptr, tensors["indices"], last)
    if kind == "decode":
        wrapper = module.BatchDecodeWithPagedKVCacheWrapper(
            tensors["workspace"], "NHD", **({"use_tensor_cores": True} if module.__name__ == PEER else {})
        )
        wrapper.plan(*pages, *heads, q_data_type=torch.bfloat16)
        wrapper.run(tensors["q"][:1], tensors["cache"])
    else:
        wrapper = module.BatchPrefillWithPagedKVCacheWrapper(tensors["workspace"], "NHD")
        rows = torch.tensor([0, ROWS], dtype=torch.int32)
        wrapper.plan(rows, *pages, *heads, causal=True, q_data_type=torch.bfloat16)
        wrapper.run(tensors["q"], tensors["cache"])
    if tensors["q"].is_cuda:
        torch.cuda.synchronize()


def child(library: str, kind: str, state: str, device: str, start: float) -> Spent:
    """What the new process does. `start`: by the clock that all processes share."""
    import torch

    shapes = {"q": (ROWS, NUM_Q_HEADS, HEAD_DIM), "cache": (PAGES, 2, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM)}
    tensors: dict[str, Any] = {
        name: torch.randn(shape, device=device, dtype=torch.bfloat16) for name, shape in shapes.items()
    }
    tensors["indices"] = torch.arange(PAGES, dtype=torch.int32, device=device)
    tensors["workspace"] = torch.empty(256 << 20 if "cuda" in device else 16 << 20, dtype=torch.uint8, device=device)
    if "cuda" in device:
        torch.cuda.synchronize()
    seconds = [time.monotonic()]
    module = importlib.import_module(library)
    seconds.append(time.monotonic())
    if state == "a cached kernel":
        (other,) = KINDS.keys() - {kind}
        make_call(other, module, tensors)
    seconds.append(time.monotonic())
    make_call(kind, module, tensors)
    seconds.append(time.monotonic())
    return Spent(seconds[3] - seconds[2], seconds[1] - seconds[0], seconds[3] - start)


def in_a_process(library: str, kind: str, state: str, device: str, folder: Path) -> Spent:
    """Seconds of a new process whose caches are in the folder."""
    own = {"PYTHONUSERBASE": site.getuserbase(), **dict.fromkeys(CACHES, str(folder))}
    arguments = [library, kind, state, device, str(time.monotonic())]
    command = [sys.executable, __file__, "--child", *arguments]
    done = subprocess.run(command, env=os.environ | own, capture_output=True, text=True, timeout=MOST_SECONDS)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1])
    return Spent(*json.loads(done.stdout.splitlines()[-1]))


def compiled(folder: Path) -> int:
    """Number of kernels that flashpage has compiled into a folder."""
    return len(list(folder.glob("**/meta.json")))


class Found:
    """Seconds of each library and state in all rounds of one kind of call."""

    def __init__(self) -> None:
        self.spent: dict[tuple[str, str], list[Spent]] = {}
        self.refused: dict[str, str] = {}

    def round(self, libraries: list[str], kind: str, device: str) -> None:
        for library in libraries:
            with tempfile.TemporaryDirectory(prefix="cold-") as name:
                try:
                    for state in STATES:
                        before = compiled(Path(name))
                        spent = in_a_process(library, kind, state, device, Path(name))
                        if library == OWN:
                            check(state, compiled(Path(name)) - before)
                        self.spent.setdefault((library, state), []).append(spent)
                except (RuntimeError, subprocess.TimeoutExpired) as failure:
                    self.refused[library] = str(failure)[:200]

    def seconds(self, state: str, of: Callable[[Spent], float]) -> dict[str, float]:
        """Medians by library."""
        rows = {label: rows for (label, found), rows in self.spent.items() if found == state}
        return {label: float(f"{statistics.median(map(of, spent)):.4g}") for label, spent in rows.items()}


def check(state: str, count: int) -> None:
    """That the process compiled what its state says: kernels in an installed wheel would be no first call."""
    if state == STATES[0] and not count:
        raise RuntimeError("nothing was compiled: flashpage has kernels that were built ahead of time")
    if state == STATES[1] and count:
        raise RuntimeError(f"{count} kernels were compiled again")


def report(kind: str, found: Found, is_card: bool, recorder: Any) -> bool:
    """Prints and records a kind of call; whether all targets were reached."""
    is_good = OWN not in found.refused
    for state in STATES:
        is_cached = state == STATES[2]
        seconds = found.seconds(state, operator.attrgetter("call") if is_cached else Spent.without_torch)
        if OWN not in seconds:
            continue
        with_torch = {} if is_cached else found.seconds(state, operator.attrgetter("whole"))
        must = {STATES[0]: KINDS[kind], STATES[2]: CACHED_MUST}.get(state) if is_card else None
        figures = {"seconds": seconds, "with_torch": with_torch, "must": must}
        recorder.add("cold", f"{kind}, {state}", **figures, refused=found.refused)
        is_missed = must is not None and seconds[OWN] > must
        is_good &= not is_missed
        limit = "" if must is None else f"({must:g})" if is_missed else f"{must:g}"
        cells = [
            f"{times[label]:.3f}" if label in times else "" for times in (seconds, with_torch) for label in (OWN, PEER)
        ]
        print(f"| {kind}, {state} | {' | '.join(cells)} | {limit} |", flush=True)
    for label, words in found.refused.items():
        print(f"| {kind} | {label}: {words} | | | | |", flush=True)
    return is_good


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        library, kind, state, device, start = sys.argv[2:]
        print(json.dumps(child(library, kind, state, device, float(start))))
        return 0
    from record import Recorder  # not above, as it imports torch, which the new processes time

    parser = Parser(__doc__)
    parser.add_argument(
        "--libraries", default="", help="comma-separated; default: flashpage and, on a card, FlashInfer"
    )
    parser.add_argument("--only", default="", choices=["", *KINDS])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="one round")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
    parser.add_argument("--json", help="append one line for each figure to this file (docs/figures.py reads it)")
    arguments = parser.parse_args()
    is_card = arguments.device.startswith("cuda")
    has_peer = is_card and importlib.util.find_spec(PEER) is not None
    libraries = arguments.libraries.split(",") if arguments.libraries else [OWN, PEER] if has_peer else [OWN]
    recorder, is_good = Recorder(arguments.json), True
    columns = ("first call", "s", "FlashInfer s", "with torch s", "FlashInfer's with torch s", "must")
    print(f"on {arguments.device}\n\n| {' | '.join(columns)} |\n|{' --- |' * len(columns)}", flush=True)
    for kind in [arguments.only] if arguments.only else KINDS:
        found = Found()
        for i in range(1 if arguments.small else arguments.rounds):
            found.round([label for label in libraries if i == 0 or label == OWN], kind, arguments.device)
        is_good &= report(kind, found, is_card, recorder)
        if OWN in found.refused:
            return 1
    return int(arguments.check and not is_good)


if __name__ == "__main__":
    sys.exit(main())
