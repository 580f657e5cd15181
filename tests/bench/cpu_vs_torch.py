"""The CPU backend compared with torch's scaled_dot_product_attention: equal values and threads, timed alternately.

Torch gets its best layout, contiguous [batch, heads, tokens, head_dim], with grouped heads and with repeated ones; the
faster one counts. flashpage reads shuffled pages of 16 tokens (decode) or ragged rows (prefill). The floor is the
larger of two times: flops at the measured rate of multiplications, and bytes at the measured rate of reads from memory.
Exit status 1 if torch is faster, or if flashpage's error is more than twice torch's.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention
from workloads import Paged, indptr

import flashpage
from flashpage import native
from flashpage.jit import host_target
from flashpage.jit.compilers import find_cxx

NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE = 32, 8, 128, 16
GROUP = NUM_Q_HEADS // NUM_KV_HEADS


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of the table: `batch` requests of the same lengths."""

    name: str
    batch: int
    q_len: int
    kv_len: int
    dtype: torch.dtype

    @property
    def flops(self) -> float:
        pairs = self.q_len * self.kv_len - (self.q_len * (self.q_len - 1)) / 2  # causal, right-aligned
        return 4.0 * self.batch * NUM_Q_HEADS * HEAD_DIM * pairs

    @property
    def bytes(self) -> float:
        rows = 2 * self.batch * (self.kv_len * NUM_KV_HEADS + self.q_len * NUM_Q_HEADS)
        return float(rows * HEAD_DIM * self.dtype.itemsize)


CASES = [
    Case(name, *lengths, dtype)
    for name, lengths in (("decode 16 x 2k", (16, 1, 2048)), ("causal prefill 1 x 1k", (1, 1024, 1024)))
    for dtype in (torch.float32, torch.bfloat16)
]


def flashpage_call(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], torch.Tensor]:
    """flashpage's call for q, k, v [batch, tokens, heads, head_dim]."""
    workspace = torch.empty(64 << 20, dtype=torch.uint8)
    rows = q.reshape(-1, NUM_Q_HEADS, HEAD_DIM)
    if case.q_len > 1:
        ragged = flashpage.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
        starts = indptr([case.q_len] * case.batch)
        ragged.plan(starts, starts, NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, causal=True, q_data_type=case.dtype)
        keys, values = (t.reshape(-1, NUM_KV_HEADS, HEAD_DIM) for t in (k, v))
        return lambda: ragged.run(rows, keys, values)
    table = Paged([case.kv_len] * case.batch, PAGE_SIZE, torch.device("cpu"))
    cache = torch.empty(table.num_pages, 2, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM, dtype=case.dtype)
    for i, tensor in enumerate((k, v)):
        cache[table.indices.long(), i] = tensor.reshape(-1, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM)
    paged = flashpage.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")
    pages = (table.indptr, table.indices, table.last_page_len)
    paged.plan(*pages, NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, q_data_type=case.dtype)
    return lambda: paged.run(rows, cache)


def torch_calls(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[Callable[[], torch.Tensor]]:
    q, k, v = (t.transpose(1, 2).contiguous() for t in (q, k, v))
    repeated = [t.repeat_interleave(GROUP, 1) for t in (k, v)]
    causal = case.q_len > 1
    return [
        lambda: scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True),
        lambda: scaled_dot_product_attention(q, *repeated, is_causal=causal),
    ]


def times_ms(calls: list[Callable[[], torch.Tensor]], repeats: int) -> list[list[float]]:
    """Times of each call. The calls alternate, so other load on the machine affects all of them."""
    times: list[list[float]] = [[] for _ in calls]
    for turn in range(repeats + 1):
        for call, spent in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            if turn:
                spent.append((time.perf_counter() - start) * 1e3)
    return times


def machine_limits(threads: int) -> tuple[dict[torch.dtype, float], float]:
    """Flops per second of all threads, by type, and bytes per second read from memory."""
    compiler = find_cxx()
    assert compiler is not None, "g++ is needed"
    source = Path(__file__).with_name("cpu_peak.cpp")
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "peak"
        command = [a for a in compiler.command(source, program, host_target()) if a not in ("-shared", "-fPIC")]
        subprocess.run(command, check=True)
        output = subprocess.run([program, "0.3"], check=True, capture_output=True, text=True).stdout
    fp32, bf16 = (float(number) * 1e9 * threads for number in output.split())
    numbers = torch.ones(64 << 20)
    (reading,) = times_ms([numbers.sum], 15)
    return {torch.float32: fp32, torch.bfloat16: bf16}, numbers.nbytes / min(reading) * 1e3


def errors(case: Case, inputs: list[torch.Tensor], ours: torch.Tensor, theirs: torch.Tensor) -> tuple[float, float]:
    """Norms of the differences from the fp64 result, relative to its norm."""
    q, k, v = (t.transpose(1, 2).double() for t in inputs)
    exact = scaled_dot_product_attention(q, k, v, is_causal=case.q_len > 1, enable_gqa=True)
    ours = ours.reshape(case.batch, case.q_len, NUM_Q_HEADS, HEAD_DIM).transpose(1, 2)
    return tuple(((out.double() - exact).norm() / exact.norm()).item() for out in (ours, theirs))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    threads = native.load().fp_cpu_threads()
    torch.set_num_threads(threads)
    flops, bandwidth = machine_limits(threads)
    print(f"{threads} threads, {host_target().name}: ", end="")
    print(f"{flops[torch.float32] / 1e9:.0f} Gflop/s in fp32, {flops[torch.bfloat16] / 1e9:.0f} in bf16, ", end="")
    print(f"{bandwidth / 1e9:.0f} GB/s read; medians of {repeats}")
    print("| case | type | floor ms | flashpage ms | torch ms | torch, repeated ms | speedup | error over torch's |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    passed = True
    for case in CASES:
        generator = torch.Generator().manual_seed(0)
        shapes = ((case.q_len, NUM_Q_HEADS), (case.kv_len, NUM_KV_HEADS), (case.kv_len, NUM_KV_HEADS))
        inputs = [torch.randn(case.batch, *shape, HEAD_DIM, generator=generator).to(case.dtype) for shape in shapes]
        calls = [flashpage_call(case, *inputs), *torch_calls(case, *inputs)]
        ratios = errors(case, inputs, calls[0](), calls[1]())
        ours, *theirs = (statistics.median(spent) for spent in times_ms(calls, repeats))
        floor = max(case.flops / flops[case.dtype], case.bytes / bandwidth) * 1e3
        speedup, error = min(theirs) / ours, ratios[0] / ratios[1]
        passed &= speedup >= 1 and error <= 2
        times = " | ".join(f"{ms:.1f}" for ms in (floor, ours, *theirs))
        name = str(case.dtype).removeprefix("torch.")
        print(f"| {case.name} | {name} | {times} | {speedup:.2f} | {error:.2f} |", flush=True)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
