"""The planner alone: host time of fp_plan, and the balance of its partition for batches of up to a million requests.

Times are of one thread with the index arrays in its cache, the least of several rounds (half a microsecond is the call
through ctypes). Loads are by the cost model: what a CTA takes at the costs of flashpage/kernels/tile.py.
"""

from __future__ import annotations

import ctypes
import time

import numpy as np
from command_line import Parser

from flashpage import native
from flashpage.base.dtypes import DType
from flashpage.kernels import choose, devices, schedules
from flashpage.kernels.options import Options
from flashpage.kernels.work import Problem

HEAD_DIM, PAGE_SIZE = 128, 16
KINDS = ("uniform", "lognormal", "zipf", "one long")


def lengths(kind: str, count: int, mean: int) -> np.ndarray:
    """Tokens of each request, [count], with the given mean, in random order."""
    if kind == "one long":
        short = max(1, mean // 16)
        values = np.full(count, short)
        values[count // 3] = mean * count - short * (count - 1)
        return values
    rng = np.random.default_rng(0)
    weights = {
        "uniform": np.ones(count),
        "lognormal": rng.lognormal(0.0, 1.0, count),
        "zipf": rng.permutation(1.0 / np.arange(1, count + 1)),
    }[kind]
    return np.maximum(1, np.rint(weights / weights.sum() * mean * count)).astype(np.int64)


class Batch:
    """One batch as the planner gets it: int32 arrays and structs, kept alive."""

    def __init__(self, q_len: int, kv_lens: np.ndarray, heads: tuple[int, int], num_ctas: int) -> None:
        count = len(kv_lens)
        pages = -(-kv_lens // PAGE_SIZE)
        self.arrays = [
            np.arange(count + 1, dtype=np.int32) * q_len,
            np.concatenate([[0], np.cumsum(pages)]).astype(np.int32),
            ((kv_lens - 1) % PAGE_SIZE + 1).astype(np.int32),
        ]
        pointers = [native.IndexArray(a.ctypes.data, 1, 0, len(a)) for a in self.arrays]
        self.problem = native.ProblemStruct(count, 0, *pointers, native.IndexArray(), PAGE_SIZE, *heads, (1, -1), 0)
        self.schedule = make_schedule(q_len, heads, num_ctas)
        self.result = native.PlanResult()
        plan_bytes, partial_rows = ctypes.c_int64(), ctypes.c_int64()
        native.check(
            native.load().fp_plan_bounds(
                count,
                count * q_len,
                int(kv_lens.sum()),
                0,
                *heads,
                ctypes.byref(self.problem.visibility),
                ctypes.addressof(self.schedule),
                ctypes.byref(plan_bytes),
                ctypes.byref(partial_rows),
            )
        )
        self.buffer = np.zeros(plan_bytes.value, np.uint8)

    def microseconds(self, rounds: int) -> float:
        """The least of all rounds. A round repeats the plan for half a millisecond, less than a time slice."""
        addresses = ctypes.addressof(self.problem), ctypes.addressof(self.schedule)
        buffer = self.buffer.ctypes.data, len(self.buffer)
        arguments = (*addresses, *buffer, ctypes.addressof(self.result))
        fp_plan = native.load().fp_plan
        native.check(fp_plan(*arguments))
        repeats, best = 1, float("inf")
        for _ in range(rounds):
            start = time.perf_counter_ns()
            for _ in range(repeats):
                fp_plan(*arguments)
            best = min(best, (time.perf_counter_ns() - start) / repeats / 1e3)
            repeats = max(1, int(500 / best))
        return best


def make_schedule(q_len: int, heads: tuple[int, int], num_ctas: int) -> native.Schedule:
    """Tile and costs of the newest CUDA kernel for such rows."""
    options = Options(
        kv_source="paged",
        num_q_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim_qk=HEAD_DIM,
        head_dim_vo=HEAD_DIM,
        page_size=PAGE_SIZE,
        q_dtype=DType.BFLOAT16,
        kv_dtype=DType.BFLOAT16,
        out_dtype=DType.BFLOAT16,
        uniform_q_len=q_len,
    )
    problem = Problem(options, choose.packed_rows(options, 1, q_len))
    choice = choose.choose_for_card(problem, devices.H200)
    return schedules.schedule(choice, options, num_ctas)


def row(what: str, kind: str, batch: Batch, rounds: int) -> None:
    us, result, problem = batch.microseconds(rounds), batch.result, batch.problem
    mean = result.cost_total_ns / batch.schedule.num_ctas
    over = 100 * (result.cost_max_ns / mean - 1) if mean else 0.0
    heads = f"{problem.num_q_heads}/{problem.num_kv_heads}"
    columns = (
        what,
        problem.batch,
        kind,
        heads,
        batch.schedule.num_ctas,
        f"{us:.1f}",
        f"{mean / 1e3:.1f}",
        f"+{over:.2f}%",
    )
    cells = (*columns, result.num_items, result.num_merges, result.used_bytes)
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--rounds", type=int, default=200, help="of each timing")
    parser.add_argument("--largest", type=int, default=1_000_000, help="requests of the largest simulated batch")
    arguments = parser.parse_args()
    print("| | batch | lengths | heads | CTAs | host, us | mean CTA, us | costliest | items | merges | bytes |")
    print("| --- " * 11 + "|")
    for num_ctas in (132, 264):  # one card, with one and two CTAs on each SM
        for count in (1, 64, 256, 4096):
            for kind in KINDS[:2] if count > 1 else KINDS[:1]:
                for heads in ((32, 8), (8, 1)):
                    row("decode", kind, Batch(1, lengths(kind, count, 4096), heads, num_ctas), arguments.rounds)
        for count in (1, 64, 256):
            batch = Batch(1024, np.full(count, 1024), (32, 8), num_ctas)
            row("prefill, 1,024 rows", "uniform", batch, arguments.rounds)
    for num_ctas in (132, 1056, 8448):  # one card, eight cards, sixty-four
        for count in (10_000, 100_000, 1_000_000):
            if count <= arguments.largest:
                for kind in KINDS:
                    row("decode, simulated", kind, Batch(1, lengths(kind, count, 1024), (32, 8), num_ctas), 3)


if __name__ == "__main__":
    main()
