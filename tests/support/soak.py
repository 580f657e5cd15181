"""Plans and runs many random batches in two threads with a stream each; some steps are refused, most are never run.
Wrappers for graphs plan again for their captured runs. Memory, threads and files of the process must not grow, and a
batch must give the same bits at the end as at the start.

`PYTHONPATH=. python tests/support/soak.py --device cuda --size 1` does 10^6 plans and 10^5 runs, and
tests/net/test_soak.py a fiftieth of it.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import random
import resource
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from bad_inputs.rows import equal, good_arguments
from bad_inputs.scene import DIM, HEADS, KV_HEADS, PAGE, Make
from bad_inputs.scenes import scenes

import flashpage
from flashpage import FlashpageError
from flashpage.base import env

PLANS, RUNS, THREADS = 1_000_000, 100_000, 2
PAGES = 64
REQUESTS, MOST_ROWS = 4, 17  # of batches that are captured
WRAPPERS = (
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
)
GROWTH = {"bytes": 12 << 20, "device bytes": 32 << 10, "threads": 0, "files": 0, "cache entries": 30, "objects": 2500}


class Captured:
    """A wrapper for graphs, and its run: a captured one on a card, which later plans change; a call on the CPU."""

    def __init__(self, make: Make, cache: torch.Tensor, rows: torch.Tensor, *, has_buffers: bool) -> None:
        ints = lambda count: torch.zeros(count, dtype=torch.int32, device=make.device)
        memory, self.make, self.cache, self.is_decode = make.workspace(8 << 20), make, cache, has_buffers
        if has_buffers:
            self.wrapper = flashpage.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(
                memory, ints(REQUESTS + 1), ints(PAGES), ints(REQUESTS)
            )
        else:
            self.wrapper = flashpage.BatchPrefillWithPagedKVCacheWrapper(
                memory, use_cuda_graph=True, max_batch=REQUESTS, max_pages=PAGES, max_rows=REQUESTS * MOST_ROWS
            )
        self.q = rows[: REQUESTS * (1 if has_buffers else MOST_ROWS)]
        self.out, self.graph = torch.empty_like(self.q), None
        self.plan(random.Random(0))
        self.run()
        if make.device != "cpu":
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self._run()

    def plan(self, draw: random.Random) -> None:
        count = REQUESTS if self.is_decode else draw.randrange(1, REQUESTS + 1)
        rows = [1 if self.is_decode else draw.choice((0, 1, MOST_ROWS)) for _ in range(count)]
        arrays = paged_batch(draw, self.make.device, [draw.choice((0, 1, 16, 17, 100)) for _ in range(count)])
        first = () if self.is_decode else (indptr_of(rows),)
        self.wrapper.plan(*first, *arrays, HEADS, KV_HEADS, DIM, PAGE, q_data_type=self.make.dtype)
        self.used = sum(rows)

    def run(self) -> None:
        if self.graph is None:
            self._run()
        else:
            self.graph.replay()

    def _run(self) -> None:
        self.wrapper.run(self.q, self.cache, out=self.out)

    def check(self) -> None:
        assert bool(self.out[: self.used].isfinite().all())


def indptr_of(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def paged_batch(draw: random.Random, device: str, tokens: list[int]) -> tuple[torch.Tensor, ...]:
    """indptr, page numbers and last_page_len of requests with so many tokens."""
    counts = [-(-n // PAGE) for n in tokens]
    indices = torch.tensor([draw.randrange(PAGES) for _ in range(sum(counts))], dtype=torch.int32)
    last = torch.tensor([n - (c - 1) * PAGE if c else 0 for n, c in zip(tokens, counts, strict=True)]).int()
    return indptr_of(counts), indices.to(device), last


class Worker:
    """The wrappers of one thread, and random steps on them."""

    def __init__(self, seed: int, device: str) -> None:
        self.random, self.make = random.Random(seed), Make(device)
        self.cache = self.make.data(PAGES, 2, PAGE, KV_HEADS, DIM)
        self.rows = self.make.data(PAGES * PAGE, HEADS, DIM)
        self.wrappers = [getattr(flashpage, name)(self.make.workspace(8 << 20)) for name in WRAPPERS]
        self.captured = [Captured(self.make, self.cache, self.rows, has_buffers=kind) for kind in (True, False)]
        self.stream = torch.cuda.Stream(device) if device != "cpu" else None
        self.plans = self.runs = self.refused = 0

    def work(self, plans: int, runs: int) -> None:
        stream = contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream)
        every = max(1, plans // max(1, runs))
        with stream:
            for number in range(plans):
                self.step(number % every == 0)
            if self.stream is not None:
                self.stream.synchronize()

    def step(self, is_run: bool) -> None:
        """Plans once and may run it. One plan in 50 has bad lengths and is refused."""
        draw = self.random
        i, count = draw.randrange(len(WRAPPERS) + len(self.captured)), draw.randrange(5)
        if i >= len(WRAPPERS):
            self._step_captured(self.captured[i - len(WRAPPERS)], is_run)
            return
        rows = [draw.choice((1, 1, 2, 17)) if i else 1 for _ in range(count)]
        tokens = [draw.choice((0, 1, 15, 16, 17, 100)) for _ in range(count)]
        self.plans += 1
        if draw.random() < 0.02:
            with contextlib.suppress(FlashpageError):
                self._plan(i, rows, [-1, *tokens[1:]] if tokens else [-1], {"window_left": 3})
                self.refused -= 1
            self.refused += 1
            return
        self._plan(i, rows, tokens, self._options(i))
        if is_run:
            self._run(i, rows, tokens)

    def _step_captured(self, captured: Captured, is_run: bool) -> None:
        captured.plan(self.random)
        self.plans += 1
        if is_run:
            captured.run()
            self.runs += 1
            if self.runs % 50 == 0:
                captured.check()

    def _options(self, i: int) -> dict[str, Any]:
        draw = self.random
        options: dict[str, Any] = {
            "window_left": draw.choice((-1, -1, 0, 20, 64)),
            "sm_scale": draw.choice((None, 0.1)),
        }
        if i:
            options["causal"] = draw.random() < 0.5
        if draw.random() < 0.2:
            options["fixed_split_size"] = draw.choice((1, 4))
        return options

    def _plan(self, i: int, rows: list[int], tokens: list[int], options: dict[str, Any]) -> None:
        types = {"q_data_type": self.make.dtype}
        if i == 2:
            self.wrappers[i].plan(indptr_of(rows), indptr_of(tokens), HEADS, KV_HEADS, DIM, **types, **options)
            return
        pages = paged_batch(self.random, self.make.device, tokens)
        first = (indptr_of(rows),) if i else ()
        self.wrappers[i].plan(*first, *pages, HEADS, KV_HEADS, DIM, PAGE, **types, **options)

    def _run(self, i: int, rows: list[int], tokens: list[int]) -> None:
        q = self.rows[: sum(rows)]
        kv = (self.cache,) if i < 2 else (self.rows[: sum(tokens), :KV_HEADS], self.rows[: sum(tokens), 2:])
        self.runs += 1
        if self.random.random() < 0.02:
            try:
                self.wrappers[i].run(self.rows[: sum(rows) + 1], *kv)
            except FlashpageError:
                self.refused += 1
                return
            raise AssertionError("one row more than planned was not refused")
        options = {"window_left": self.random.choice((5, 9))} if self.random.random() < 0.1 else {}
        out = self.wrappers[i].run(q, *kv, return_lse=self.random.random() < 0.5, **options)
        out = out[0] if isinstance(out, tuple) else out
        assert out.shape == q.shape and (self.runs % 50 or bool(out.isfinite().all()))


def held(device: str) -> dict[str, int]:
    """The memory, threads, files and objects that the process holds now."""
    gc.collect()
    if device != "cpu":
        torch.cuda.synchronize()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    folder = env.cache_dir()
    return {
        "bytes": pages * resource.getpagesize(),
        "device bytes": torch.cuda.memory_allocated() if device != "cpu" else 0,
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
        "cache entries": sum(1 for _ in folder.rglob("*")) if folder.exists() else 0,
        "objects": len(gc.get_objects()),
    }


def soak(device: str, size: float, names: frozenset[str], say: Callable[[str], Any] = print) -> None:
    """Raises if one of the `names` grows in both later parts of the work: a leak does, but a module is loaded once."""
    scene, make = scenes()[WRAPPERS[1]], Make(device)
    _, expected = scene.run(good_arguments(scene, make))
    workers = [Worker(seed, device) for seed in range(THREADS)]
    plans, runs = int(PLANS * size) // THREADS, int(RUNS * size) // THREADS
    start = time.monotonic()
    with ThreadPoolExecutor(THREADS) as pool:

        def part(share: float) -> None:
            began = threading.Barrier(THREADS)

            def work(worker: Worker) -> None:
                began.wait()
                worker.work(int(plans * share), int(runs * share))

            for done in [pool.submit(work, worker) for worker in workers]:
                done.result()

        parts = []
        for share in (0.4, 0.3, 0.3):
            part(share)
            parts.append(held(device))
    totals = [sum(getattr(w, name) for w in workers) for name in ("plans", "runs", "refused")]
    say(f"{device}: {totals[0]} plans, {totals[1]} runs, {totals[2]} refused in {time.monotonic() - start:.0f} s")
    say("\n".join(f"held after part {i}: {what}" for i, what in enumerate(parts, 1)))
    growth = {name: min(parts[1][name] - parts[0][name], parts[2][name] - parts[1][name]) for name in names}
    grown = {name: growth[name] for name in names if growth[name] > GROWTH[name]}
    assert not grown, f"grew by {grown} in each of two parts of {int(plans * 0.3) * THREADS} plans"
    assert totals[2] > 0, "nothing was refused"
    assert equal(scene.run(good_arguments(scene, make))[1], expected), "not the result of the start"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", type=float, default=0.02, help="1: 10^6 plans and 10^5 runs")
    parser.add_argument("--shared-cache", action="store_true", help="other processes compile too: count no entries")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    others = frozenset({"cache entries"} if arguments.shared_cache else ())
    soak(arguments.device, arguments.size, frozenset(GROWTH) - others)
