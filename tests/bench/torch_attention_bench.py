"""PyTorch's attention functions on flashpage's kernels, next to torch's own FA2, FA3 and cuDNN, in turns.

Each implementation is activated, called and captured as a CUDA graph; then the graphs' replays take turns. Ragged keys,
whose lengths flashpage plans on the host, are called without a graph, after enough other work to hide the host's time.
An implementation that a machine lacks, or that refuses a case, has the reason in place of a time. FA3 comes from
FlashAttention's package or from vLLM's build (torch_fa3.py). `--small --device cpu` runs tiny shapes of flashpage alone
with the host's clock: it only shows that the program works.
"""

from __future__ import annotations

import contextlib
import inspect
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch_fa3
from command_line import Parser
from gpu import GpuClock, HostClock, rounds_of
from record import Recorder
from torch.nn import attention
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from workloads import chat, indptr

from flashpage import torch_attention

HEADS, DIM = 32, 128
IMPLEMENTATIONS = ("flashpage", "FA2", "FA3", "cudnn")
ROUNDS = 5
GROUPED = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}  # 2.11 needs none


class Case(NamedTuple):
    """Equally long requests of scaled_dot_product_attention, or of varlen_attn over pages; or ragged ones, whose
    `tokens` is the mean of a lognormal distribution."""

    name: str
    batch: int
    rows: int
    tokens: int
    page: int = 0
    kv_heads: int = 8
    is_ragged: bool = False


CASES = (
    Case("prefill 1 x 4k", 1, 4096, 4096),
    Case("prefill 4 x 2k", 4, 2048, 2048),
    Case("append 1 x 512 to 8k", 1, 512, 8192),
    Case("decode 64 x 4k", 64, 1, 4096),
    Case("paged decode 64 x 4k, page 256", 64, 1, 4096, 256),
    Case("paged decode 64 x 4k, page 16", 64, 1, 4096, 16),
    Case("paged append 8 x 128 to 4k, page 256", 8, 128, 4096, 256),
    Case("varlen, 16 prompts, mean 2k", 16, 2048, 2048, is_ragged=True),
    Case("varlen, 16 prompts, mean 2k, 32 KV heads", 16, 2048, 2048, kv_heads=32, is_ragged=True),
    Case("varlen, 512 rows to each of 8 contexts, mean 8k", 8, 512, 8192, is_ragged=True),
    Case("varlen, one row to each of 64 contexts, mean 4k", 64, 1, 4096, is_ragged=True),
)


class BusyClock(GpuClock):
    """The card's clock for calls without a graph: the card has a millisecond of other work when the host begins."""

    def prepare(self) -> None:
        for _ in range(8):
            self.flush.amax()


def dense(case: Case, device: str, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    shapes = ((case.rows, HEADS), (case.tokens, case.kv_heads), (case.tokens, case.kv_heads))
    q, k, v = (
        torch.randn(case.batch, rows, heads, DIM, device=device, dtype=dtype).transpose(1, 2) for rows, heads in shapes
    )
    is_causal = case.rows == case.tokens  # torch's flag needs equal lengths
    return lambda: scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)


def paged(case: Case, device: str, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    count = -(-case.tokens // case.page)
    pages = (case.batch * count, case.page, case.kv_heads, DIM)
    k, v = (torch.randn(pages, device=device, dtype=dtype) for _ in range(2))
    table = torch.randperm(pages[0], device=device).int().view(case.batch, count)
    q = torch.randn(case.batch * case.rows, HEADS, DIM, device=device, dtype=dtype)
    ends = torch.arange(case.batch + 1, dtype=torch.int32, device=device) * case.rows
    used = torch.full((case.batch,), case.tokens, dtype=torch.int32, device=device)
    given: dict[str, Any] = {"seqused_k": used, "block_table": table, "window_size": (-1, 0), **GROUPED}
    return lambda: varlen_attn(q, k, v, ends, None, case.rows, case.tokens, **given)


def ragged(case: Case, device: str, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    tokens = [max(n, 1 if case.rows == case.tokens else case.rows) for n in chat(case.batch, case.tokens)]
    rows = tokens if case.rows == case.tokens else [case.rows] * case.batch
    q = torch.randn(sum(rows), HEADS, DIM, device=device, dtype=dtype)
    k, v = (torch.randn(sum(tokens), case.kv_heads, DIM, device=device, dtype=dtype) for _ in range(2))
    ends = [indptr(lengths).to(device) for lengths in (rows, tokens)]
    return lambda: varlen_attn(q, k, v, *ends, max(rows), max(tokens), window_size=(-1, 0), **GROUPED)


@contextlib.contextmanager
def active(name: str, device: str) -> Iterator[None]:
    """An implementation under torch's functions. On the CPU flashpage is the only one."""
    if device == "cpu":
        registration = torch_attention.register("CPU")
        yield
        registration.remove()
        return
    is_own = name in ("FA2", "cudnn")
    if name == "FA3":
        torch_fa3.register()
    if not is_own:
        attention.activate_flash_attention_impl(name)
    try:
        backend = attention.SDPBackend.CUDNN_ATTENTION if name == "cudnn" else attention.SDPBackend.FLASH_ATTENTION
        with attention.sdpa_kernel(backend):
            yield
    finally:
        if not is_own:
            attention.restore_flash_attention_impl()


class Found(NamedTuple):
    """Microseconds of each implementation in each round, why others did not run, and how far outputs are from FA2's at
    most."""

    us: dict[str, list[float]]
    refused: dict[str, str] = {}
    from_fa2: dict[str, float] = {}


def on_card(case: Case, call: Callable[[], torch.Tensor], repeats: int) -> Found:
    """All implementations that can run the case, in turns."""
    clock = BusyClock(repeats) if case.is_ragged else GpuClock(repeats)
    calls: dict[str, Callable[[], object]] = {}
    refused, outs = {}, {}
    for name in IMPLEMENTATIONS:
        if name == "cudnn" and (case.page or case.is_ragged):  # varlen_attn does not run on it
            continue
        try:
            with torch.no_grad(), active(name, "cuda"):
                outs[name] = call().float()
                calls[name] = call if case.is_ragged else clock.capture(call)
        except Exception as error:
            refused[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    spent: dict[str, list[float]] = {name: [] for name in calls}
    if not case.is_ragged:
        spent = rounds_of(calls, ROUNDS, clock)
    else:  # without a graph, which would keep its implementation, each call needs its own to be active
        for i in range(ROUNDS):
            for name in list(calls)[:: -1 if i % 2 else 1]:
                with torch.no_grad(), active(name, "cuda"):
                    spent[name].append(clock.seconds(call) * 1e6)
    exact = outs.pop("FA2", None)
    differences = {} if exact is None else {n: (out - exact).abs().max().item() for n, out in outs.items()}
    return Found(spent, refused, {name: float(f"{far:.2g}") for name, far in differences.items()})


def on_cpu(call: Callable[[], torch.Tensor], repeats: int) -> Found:
    with torch.no_grad(), active("flashpage", "cpu"):
        return Found(rounds_of({"flashpage": call}, 1, HostClock(repeats)))


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--small", action="store_true", help="tiny shapes")
    parser.add_argument("--json", help="append figures to this file")
    arguments = parser.parse_args()
    is_card = arguments.device != "cpu"
    recorder, dtype = Recorder(arguments.json), torch.bfloat16 if is_card else torch.float32
    print("| case | implementation | us, median (least) | from FA2 at most |\n| --- | --- | --- | --- |")
    for case in CASES:
        if arguments.only not in case.name:
            continue
        if arguments.small:
            rows = min(case.rows, 8)
            case = case._replace(batch=min(case.batch, 2), rows=rows, tokens=rows if case.rows == case.tokens else 40)
        tensors = ragged if case.is_ragged else paged if case.page else dense
        call = tensors(case, arguments.device, dtype)
        found = on_card(case, call, arguments.repeats) if is_card else on_cpu(call, arguments.repeats)
        for name, us in found.us.items():
            far = found.from_fa2.get(name, "")
            print(f"| {case.name} | {name} | {statistics.median(us):.1f} ({min(us):.1f}) | {far} |", flush=True)
        for name, reason in found.refused.items():
            print(f"| {case.name} | {name} | not here: {reason} | |", flush=True)
        if found.us:
            medians = {name: round(statistics.median(us), 2) for name, us in found.us.items()}
            recorder.add("torch-attention", case.name, us=medians, refused=found.refused, from_fa2=found.from_fa2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
