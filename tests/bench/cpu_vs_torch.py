"""The CPU backend compared with torch: equal values and threads, timed alternately.

Torch gets its best layout, contiguous [batch, heads, tokens, head_dim]. The fastest of three calls counts:
scaled_dot_product_attention with grouped heads and with repeated ones, and two matrix products for each KV head with a
softmax between them, whose rows are those of all query heads of the group. flashpage reads shuffled pages of 16 tokens
(decode) or ragged rows (prefill). Latent rows (MLA) are keys of one head, and their first columns are the values. The
floor is the larger of two times: flops at the measured rate of multiplications, and bytes at the measured rate of reads
from memory.
Exit status 1 if torch is faster, or if flashpage's error is more than twice torch's.
"""

from __future__ import annotations

import dataclasses
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from command_line import Parser
from torch.nn.functional import scaled_dot_product_attention
from workloads import Paged, indptr

import flashpage
from flashpage import native
from flashpage.jit import host_target
from flashpage.jit.compilers import find_cxx

PAGE_SIZE = 16


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of the table: `batch` requests of the same lengths."""

    name: str
    batch: int
    q_len: int
    kv_len: int
    dtype: torch.dtype
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    head_dim_vo: int = 128  # other than head_dim: latent rows

    @property
    def is_latent(self) -> bool:
        return self.head_dim_vo != self.head_dim

    @property
    def group(self) -> int:
        return self.num_q_heads // self.num_kv_heads

    @property
    def flops(self) -> float:
        pairs = self.q_len * self.kv_len - (self.q_len * (self.q_len - 1)) / 2  # causal, right-aligned
        return 2.0 * self.batch * self.num_q_heads * (self.head_dim + self.head_dim_vo) * pairs

    @property
    def bytes(self) -> float:
        columns = self.head_dim + self.head_dim_vo
        of_token = self.head_dim if self.is_latent else columns
        elements = self.kv_len * self.num_kv_heads * of_token + self.q_len * self.num_q_heads * columns
        return float(self.batch * elements * self.dtype.itemsize)


LATENT = {"num_q_heads": 16, "num_kv_heads": 1, "head_dim": 576, "head_dim_vo": 512}
CASES = [
    Case(name, *lengths, dtype, **sizes)
    for name, lengths, sizes in (
        ("decode 16 x 2k", (16, 1, 2048), {}),
        ("causal prefill 1 x 1k", (1, 1024, 1024), {}),
        ("latent decode 4 x 2k", (4, 1, 2048), LATENT),
        ("latent decode 1 x 2k, 128 heads", (1, 1, 2048), LATENT | {"num_q_heads": 128}),
    )
    for dtype in (torch.float32, torch.bfloat16)
]


def flashpage_call(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], torch.Tensor]:
    """flashpage's call for q, k, v [batch, tokens, heads, head_dim]."""
    workspace = torch.empty(64 << 20, dtype=torch.uint8)
    rows, heads = q.reshape(-1, case.num_q_heads, case.head_dim), (case.num_q_heads, case.num_kv_heads, case.head_dim)
    if case.q_len > 1:
        ragged = flashpage.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
        starts = indptr([case.q_len] * case.batch)
        ragged.plan(starts, starts, *heads, causal=True, q_data_type=case.dtype)
        keys, values = (t.reshape(-1, case.num_kv_heads, case.head_dim) for t in (k, v))
        return lambda: ragged.run(rows, keys, values)
    table = Paged([case.kv_len] * case.batch, PAGE_SIZE, torch.device("cpu"))
    if case.is_latent:
        return latent_call(case, table, rows, k)
    cache = torch.empty(table.num_pages, 2, PAGE_SIZE, case.num_kv_heads, case.head_dim, dtype=case.dtype)
    for i, tensor in enumerate((k, v)):
        cache[table.indices.long(), i] = tensor.reshape(-1, PAGE_SIZE, case.num_kv_heads, case.head_dim)
    paged = flashpage.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")
    pages = (table.indptr, table.indices, table.last_page_len)
    paged.plan(*pages, *heads, PAGE_SIZE, q_data_type=case.dtype)
    return lambda: paged.run(rows, cache)


def latent_call(case: Case, table: Paged, rows: torch.Tensor, k: torch.Tensor) -> Callable[[], torch.Tensor]:
    wrapper = flashpage.BatchMLAPagedAttentionWrapper(torch.empty(64 << 20, dtype=torch.uint8))
    cache = torch.empty(table.num_pages, PAGE_SIZE, case.head_dim, dtype=case.dtype)
    cache[table.indices.long()] = k.reshape(-1, PAGE_SIZE, case.head_dim)
    starts, lens = indptr([case.q_len] * case.batch), torch.tensor([case.kv_len] * case.batch)
    wrapper.plan(
        metadata=flashpage.MLAPlanMetadata.csr(starts, table.indptr, table.indices, lens),
        num_heads=case.num_q_heads,
        head_dim_ckv=case.head_dim_vo,
        head_dim_kpe=case.head_dim - case.head_dim_vo,
        page_size=PAGE_SIZE,
        sm_scale=case.head_dim**-0.5,
        q_data_type=case.dtype,
    )
    return lambda: wrapper.run(query=rows, kv_cache=cache)


def torch_calls(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[Callable[[], torch.Tensor]]:
    q, k, v = (t.transpose(1, 2).contiguous() for t in (q, k, v))
    repeated = [t.repeat_interleave(case.group, 1) for t in (k, v)]
    causal = case.q_len > 1
    return [
        lambda: scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True),
        lambda: scaled_dot_product_attention(q, *repeated, is_causal=causal),
        products(case, q, k, v),
    ]


def products(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Attention by matrix products whose rows are those of all query heads of a KV head."""
    rows = q.reshape(case.batch, case.num_kv_heads, case.group * case.q_len, case.head_dim)
    seen = torch.ones(case.q_len, case.kv_len, dtype=torch.bool).tril(case.kv_len - case.q_len)
    hidden = ~seen.repeat(case.group, 1) if case.q_len > 1 else None

    def call() -> torch.Tensor:
        scores = (rows @ k.transpose(-1, -2)).float().mul_(case.head_dim**-0.5)
        if hidden is not None:
            scores.masked_fill_(hidden, -torch.inf)
        return (scores.softmax(-1).to(case.dtype) @ v).view(case.batch, case.num_q_heads, case.q_len, -1)

    return call


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
    ours = ours.reshape(case.batch, case.q_len, case.num_q_heads, case.head_dim_vo).transpose(1, 2)
    return tuple(((out.double() - exact).norm() / exact.norm()).item() for out in (ours, theirs))


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    threads = native.load().fp_cpu_threads()
    torch.set_num_threads(threads)
    flops, bandwidth = machine_limits(threads)
    print(f"{threads} threads, {host_target().name}: ", end="")
    print(f"{flops[torch.float32] / 1e9:.0f} Gflop/s in fp32, {flops[torch.bfloat16] / 1e9:.0f} in bf16, ", end="")
    print(f"{bandwidth / 1e9:.0f} GB/s read; medians of {repeats}")
    columns = "case", "type", "floor ms", "flashpage ms", "torch ms", "torch, repeated ms", "torch, products ms"
    print(f"| {' | '.join((*columns, 'speedup'))} | error over torch's |")
    print(f"{'|---' * 9}|", flush=True)
    passed = True
    for case in CASES:
        generator = torch.Generator().manual_seed(0)
        shapes = [(case.q_len, case.num_q_heads), *[(case.kv_len, case.num_kv_heads)] * 2]
        inputs = [torch.randn(case.batch, *of, case.head_dim, generator=generator).to(case.dtype) for of in shapes]
        if case.is_latent:
            inputs[2] = inputs[1][..., : case.head_dim_vo]
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
