"""vLLM's operators over its caches of blocks, compared with its own kernels, and the operators that write caches.

Everything is timed in one run on the same numbers, as CUDA graph replays with the L2 flushed before each. `--peer`
names a module that registers torch.ops._C.paged_attention_v1 when it is imported (vllm._C up to 0.24). `--small
--device cpu` runs tiny shapes with the host's clock: it only shows that the program works.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from command_line import Parser
from gpu import GpuClock, HostClock, work
from peers import Batch
from workloads import DECODE, MORE_DECODE

from flashpage import vllm_ops

BLOCK_SIZES = (8, 16, 32)


class Blocks:
    """The arguments of a batch for vLLM's operators."""

    def __init__(self, batch: Batch) -> None:
        self.batch, case = batch, batch.case
        k, v = (batch.cache[:, i].permute(0, 2, 3, 1) for i in (0, 1))  # [blocks, heads, dims, tokens]
        x = 16 // batch.cache.element_size()
        self.value_cache = v.contiguous()
        self.key_cache = k.unflatten(2, (-1, x)).transpose(3, 4).contiguous()
        self.is_fp8 = batch.cache.element_size() == 1
        if self.is_fp8:
            self.key_cache, self.value_cache = (t.view(torch.uint8) for t in (self.key_cache, self.value_cache))
        device, longest = batch.device, max(batch.kv_lens)
        self.out = torch.empty_like(batch.q)
        one = torch.ones((), device=device)
        self.arguments: list[Any] = [
            batch.q, self.key_cache, self.value_cache, case.num_kv_heads, case.head_dim**-0.5,
            batch.table.rectangular(), torch.tensor(batch.kv_lens, dtype=torch.int32, device=device), case.page_size,
            longest, None, "fp8" if self.is_fp8 else "auto", one, one, 0, 0, 0, 64, 0,
        ]  # fmt: skip
        shape = (*batch.q.shape[:2], -(-longest // 512))
        sums = (torch.empty(shape, device=device) for _ in range(2))
        self.partials = [*sums, torch.empty(*shape, case.head_dim, device=device, dtype=batch.q.dtype)]

    def calls(self, operators: Any) -> dict[str, Callable[[], torch.Tensor]]:
        def v1() -> torch.Tensor:
            operators.paged_attention_v1(self.out, *self.arguments)
            return self.out

        def v2() -> torch.Tensor:
            operators.paged_attention_v2(self.out, *self.partials, *self.arguments)
            return self.out

        return {"v1": v1, "v2": v2}


def measure_writes(libraries: dict[str, Any], clock: GpuClock | HostClock, device: torch.device, tokens: int) -> None:
    """reshape_and_cache and reshape_and_cache_flash, with tokens in consecutive slots and in any order."""
    heads, size, block_size = 8, 128, 16
    blocks = -(-tokens // block_size)
    key, value = (torch.randn(tokens, heads, size, device=device).to(torch.bfloat16) for _ in range(2))
    one = torch.ones((), device=device)
    in_order = torch.arange(tokens, device=device)
    of_blocks = in_order.view(-1, block_size)[torch.randperm(tokens // block_size, device=device)].flatten()
    orders = {"in order": in_order, "blocks shuffled": of_blocks}
    orders["shuffled"] = in_order[torch.randperm(tokens, device=device)]
    for name, shapes in (
        ("reshape_and_cache", ((blocks, heads, size // 8, block_size, 8), (blocks, heads, size, block_size))),
        ("reshape_and_cache_flash", ((blocks, block_size, heads, size),) * 2),
    ):
        caches = [torch.empty(shape, device=device, dtype=torch.bfloat16) for shape in shapes]
        for label, slots in orders.items():
            for library, operators in libraries.items():
                call = getattr(operators, name)
                write = clock.capture(lambda c=caches, s=slots, f=call: f(key, value, *c, s, "auto", one, one))
                seconds, moved = clock.seconds(write), 4 * key.numel() * 2
                columns = f"{seconds * 1e6:,.1f} us | {moved / seconds / 1e9:,.0f} GB/s"
                print(f"| {name}, {tokens} tokens {label} | {library} | {columns} |", flush=True)


def host_seconds(call: Callable[[], object], device: torch.device, repeats: int = 300) -> float:
    """Host microseconds of a call, without waiting for its kernels."""
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--peer", help="module that registers vLLM's own operators")
    parser.add_argument("--more", action="store_true", help="other batches and groups instead")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--block-size", type=int, choices=BLOCK_SIZES, help="instead of the cases' own")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--small", action="store_true", help="tiny shapes")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    clock = GpuClock(arguments.repeats) if device.type == "cuda" else HostClock(arguments.repeats)
    libraries: dict[str, Any] = {"flashpage": vllm_ops}
    writers = dict(libraries)
    if arguments.peer:
        importlib.import_module(arguments.peer)
        libraries["vllm"], writers["vllm"] = torch.ops._C, torch.ops._C_cache_ops
    print("| case | library | time | rate | error | host |\n| --- | --- | --- | --- | --- | --- |")
    for case in MORE_DECODE if arguments.more else DECODE:
        if arguments.only not in case.name or case.page_size not in BLOCK_SIZES:
            continue
        case = dataclasses.replace(case, page_size=arguments.block_size or case.page_size)
        case = case.shrunk() if arguments.small else case
        torch.manual_seed(0)
        batch = Batch(case, device)
        blocks = Blocks(batch)
        for label, operators in libraries.items():
            for name, call in blocks.calls(operators).items():
                if label == "vllm" and name == "v1" and max(batch.kv_lens) > 50_000:
                    continue  # vLLM's kernel runs out of shared memory there
                error, host = batch.error(call()), host_seconds(call, device, 2 if arguments.small else 300)
                seconds = clock.seconds(clock.capture(call))
                rate = work(case)[0] / seconds / 1e9
                columns = f"{seconds * 1e6:,.1f} us | {rate:,.0f} GB/s | {error:.1e} | {host * 1e6:.1f} us"
                print(f"| {case.name} | {label} {name} | {columns} |", flush=True)
        del batch, blocks
    for tokens in () if arguments.only else (64, 64 if arguments.small else 8192):
        measure_writes(writers, clock, device, tokens)
    return 0


if __name__ == "__main__":
    sys.exit(main())
