"""PyTorch's attention functions on flashpage's kernels, next to torch's own FA2, FA3 and cuDNN, in turns.

Each implementation is activated, called and captured as a CUDA graph; then the graphs' replays take turns. Those that a
machine lacks, or that refuse a case, are left out. `--small --device cpu` runs tiny shapes of flashpage alone with the
host's clock: it only shows that the program works.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from gpu import GpuClock, HostClock, rounds_of
from record import Recorder
from torch.nn import attention
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

from flashpage import torch_attention

HEADS, KV_HEADS, DIM = 32, 8, 128
IMPLEMENTATIONS = ("flashpage", "FA2", "FA3", "cudnn")


class Case(NamedTuple):
    """Equally long requests; page 0: scaled_dot_product_attention, otherwise varlen_attn over pages."""

    name: str
    batch: int
    rows: int
    tokens: int
    page: int = 0


CASES = (
    Case("prefill 1 x 4k", 1, 4096, 4096),
    Case("prefill 4 x 2k", 4, 2048, 2048),
    Case("append 1 x 512 to 8k", 1, 512, 8192),
    Case("decode 64 x 4k", 64, 1, 4096),
    Case("paged decode 64 x 4k, page 256", 64, 1, 4096, 256),
    Case("paged decode 64 x 4k, page 16", 64, 1, 4096, 16),
    Case("paged append 8 x 128 to 4k, page 256", 8, 128, 4096, 256),
)


def dense(case: Case, device: str, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    shapes = ((case.rows, HEADS), (case.tokens, KV_HEADS), (case.tokens, KV_HEADS))
    q, k, v = (
        torch.randn(case.batch, rows, heads, DIM, device=device, dtype=dtype).transpose(1, 2) for rows, heads in shapes
    )
    is_causal = case.rows == case.tokens  # torch's flag needs equal lengths
    return lambda: scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)


def paged(case: Case, device: str, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    count = -(-case.tokens // case.page)
    pages = (case.batch * count, case.page, KV_HEADS, DIM)
    k, v = (torch.randn(pages, device=device, dtype=dtype) for _ in range(2))
    table = torch.randperm(pages[0], device=device).int().view(case.batch, count)
    q = torch.randn(case.batch * case.rows, HEADS, DIM, device=device, dtype=dtype)
    ends = torch.arange(case.batch + 1, dtype=torch.int32, device=device) * case.rows
    used = torch.full((case.batch,), case.tokens, dtype=torch.int32, device=device)
    given: dict[str, Any] = {"seqused_k": used, "block_table": table, "enable_gqa": True, "window_size": (-1, 0)}
    return lambda: varlen_attn(q, k, v, ends, None, case.rows, case.tokens, **given)


@contextlib.contextmanager
def active(name: str, device: str) -> Iterator[None]:
    """An implementation under torch's functions. On the CPU flashpage is the only one."""
    if device == "cpu":
        registration = torch_attention.register("CPU")
        yield
        registration.remove()
        return
    is_own = name in ("FA2", "cudnn")
    if not is_own:
        attention.activate_flash_attention_impl(name)
    try:
        backend = attention.SDPBackend.CUDNN_ATTENTION if name == "cudnn" else attention.SDPBackend.FLASH_ATTENTION
        with attention.sdpa_kernel(backend):
            yield
    finally:
        if not is_own:
            attention.restore_flash_attention_impl()


def on_card(case: Case, call: Callable[[], torch.Tensor], clock: Any) -> dict[str, list[float]]:
    """Microseconds of all implementations that can run the case, as graphs in turns."""
    replays = {}
    for name in IMPLEMENTATIONS:
        if name == "cudnn" and case.page:
            continue
        try:
            with torch.no_grad(), active(name, "cuda"):
                replays[name] = clock.capture(call)
        except Exception as error:
            print(f"| {case.name} | {name} | not here: {str(error).splitlines()[0][:60]} |")
    return rounds_of(replays, 5, clock)


def on_cpu(call: Callable[[], torch.Tensor], clock: Any) -> dict[str, list[float]]:
    with torch.no_grad(), active("flashpage", "cpu"):
        return rounds_of({"flashpage": call}, 1, clock)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--small", action="store_true", help="tiny shapes")
    parser.add_argument("--json", help="append figures to this file")
    arguments = parser.parse_args()
    is_card = arguments.device != "cpu"
    clock = GpuClock(arguments.repeats) if is_card else HostClock(arguments.repeats)
    recorder, dtype = Recorder(arguments.json), torch.bfloat16 if is_card else torch.float32
    print("| case | implementation | us, median (least) |\n| --- | --- | --- |")
    for case in CASES:
        if arguments.only not in case.name:
            continue
        if arguments.small:
            rows = min(case.rows, 8)
            case = case._replace(batch=min(case.batch, 2), rows=rows, tokens=rows if case.rows == case.tokens else 40)
        call = (paged if case.page else dense)(case, arguments.device, dtype)
        found = on_card(case, call, clock) if is_card else on_cpu(call, clock)
        for name, us in found.items():
            print(f"| {case.name} | {name} | {statistics.median(us):.1f} ({min(us):.1f}) |", flush=True)
        if found:
            medians = {name: round(statistics.median(us), 2) for name, us in found.items()}
            recorder.add("torch-attention", case.name, us=medians)
    return 0


if __name__ == "__main__":
    sys.exit(main())
