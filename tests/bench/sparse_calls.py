"""Sparse attention as DeepSeek's models call it, in turns with FlashMLA where it is installed: prefill over bf16 rows,
and V4's decode, in which a row reads a window of one cache and a list of another, both in rows of 584 bytes.

Plans are made before. FlashMLA takes 64 and 128 heads. Both libraries read both caches in one call. `--small --device
cpu` runs tiny shapes: it only shows that the program works.

    python tests/bench/sparse_calls.py --json sparse_calls.jsonl
"""

from __future__ import annotations

import dataclasses
import importlib.util
import statistics
from typing import Any

import torch
from gpu import GpuClock, HostClock, rounds_of
from peers import Call
from sparse import main_of
from torch import Tensor

import flashpage
from flashpage.kernels.latent_formats import PACKED

PAGE, CKV = 64, 512
V4 = PACKED["deepseek_v4"]
PAGE_STEP = 576  # FlashMLA's pages of V4's rows are multiples of so many bytes
EXPONENT_BIAS = 127


@dataclasses.dataclass(frozen=True)
class CallCase:
    heads: int
    rows: int
    top_k: int
    tokens: int  # of a pool
    window: int = 0  # tokens of the other cache that a row reads; 0: a prefill over one cache of bf16

    @property
    def name(self) -> str:
        if self.window:
            return f"584 bytes, {self.heads} heads, batch {self.rows}, window {self.window}, top-k {self.top_k:,}"
        return f"prefill, {self.heads} heads, {self.rows:,} rows, top-k {self.top_k:,}"

    def shrunk(self) -> CallCase:
        small = {"heads": 4, "rows": 2, "top_k": 64, "tokens": 256, "window": min(self.window, 64)}
        return dataclasses.replace(self, **small)


CASES = (
    CallCase(64, 4096, 2048, 32768),
    CallCase(128, 2048, 2048, 32768),
    *(CallCase(heads, 64, 1024, 131072, 128) for heads in (64, 128)),
)


def run_of(case: CallCase, lists: Tensor, columns: int, **kinds: Any) -> Any:
    """A planned wrapper's run."""
    device = lists.device
    workspace = torch.empty(512 << 20 if device.type == "cuda" else 16 << 20, dtype=torch.uint8, device=device)
    wrapper = flashpage.BatchMLASparseAttentionWrapper(workspace)
    sizes = {"num_heads": case.heads, "head_dim_ckv": CKV, "head_dim_kpe": columns - CKV, "page_size": PAGE}
    wrapper.plan(lists, **sizes, q_data_type=torch.bfloat16, **kinds)
    return wrapper.run


def drawn_lists(case: CallCase, count: int, device: torch.device) -> Tensor:
    """Lists of `count` different tokens for each row."""
    rows = [torch.randperm(case.tokens, device=device)[:count] for _ in range(case.rows)]
    return torch.stack(rows).int()


def exact(q: Tensor, tokens: Tensor, scale: float, sinks: Tensor | None = None) -> Tensor:
    """The first row's output in fp64."""
    scores = q[0].double() @ tokens.double().T * scale
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None]], 1)
    return scores.softmax(-1)[:, : len(tokens)] @ tokens[:, :CKV].double()


class Prefill:
    def __init__(self, case: CallCase, device: torch.device) -> None:
        self.case, self.scale, columns = case, 192**-0.5, 576
        self.q = torch.randn(case.rows, case.heads, columns, device=device).bfloat16()
        self.rows = torch.randn(case.tokens, columns, device=device).bfloat16()
        self.lists = drawn_lists(case, case.top_k, device)

    def expected(self) -> Tensor:
        return exact(self.q, self.rows[self.lists[0].long()], self.scale)

    def own_call(self) -> Call:
        run = run_of(self.case, self.lists, self.q.shape[2], sm_scale=self.scale)
        cache = self.rows.view(-1, PAGE, self.q.shape[2])
        return lambda: run(query=self.q, kv_cache=cache, indices=self.lists)

    def flashmla_call(self) -> Call:
        import flash_mla

        given = (self.q, self.rows.unsqueeze(1), self.lists.unsqueeze(1), self.scale)
        return lambda: flash_mla.flash_mla_sparse_fwd(*given, use_legacy=True)[0]


class Decode:
    """Two pools of V4's rows, each with its lists, and sinks."""

    def __init__(self, case: CallCase, device: torch.device) -> None:
        self.case, self.scale = case, CKV**-0.5
        self.q = torch.randn(case.rows, case.heads, CKV, device=device).bfloat16()
        self.sinks = torch.randn(case.heads, device=device)
        self.pools = [self._pool(device) for _ in range(2)]
        self.lists = [drawn_lists(case, count, device) for count in (case.window, case.top_k)]

    def _pool(self, device: torch.device) -> Tensor:
        pages = self.case.tokens // PAGE
        page_bytes = -(-PAGE * V4.row_bytes // PAGE_STEP) * PAGE_STEP
        memory = torch.zeros(pages, page_bytes, dtype=torch.uint8, device=device)
        pool = memory[:, : PAGE * V4.row_bytes].unflatten(1, (PAGE, V4.row_bytes))
        numbers = torch.arange(self.case.tokens, dtype=torch.int32, device=device)
        rows = torch.randn(self.case.tokens, CKV, device=device).bfloat16()
        ends = torch.tensor([0, pages], dtype=torch.int32, device=device)
        last = torch.full((1,), PAGE, dtype=torch.int32, device=device)
        table = (torch.zeros_like(numbers), numbers, pool, None, numbers[:pages], ends, last)
        flashpage.append_paged_mla_kv_cache(rows, rows[:, :0], *table, kv_row_format="deepseek_v4")
        return pool

    def _tokens(self, pool: Tensor, listed: Tensor) -> Tensor:
        """Rows as the pool holds them: e4m3 numbers, bf16 numbers, and at the page's end an exponent for 64 columns."""
        width = V4.quantised + 2 * (CKV - V4.quantised)
        pages = pool.flatten(1)[(listed // PAGE).long()]
        at = (listed % PAGE).long()[:, None]
        numbers = pages.gather(1, at * width + torch.arange(width, device=pool.device))
        blocks = V4.quantised // V4.scale_columns
        scale_bytes = V4.row_bytes - width
        exponents = pages.gather(1, PAGE * width + at * scale_bytes + torch.arange(blocks, device=pool.device))
        scales = (exponents.double() - EXPONENT_BIAS).exp2().repeat_interleave(V4.scale_columns, 1)
        left = numbers[:, : V4.quantised].contiguous().view(torch.float8_e4m3fn).double() * scales
        return torch.cat([left, numbers[:, V4.quantised :].contiguous().view(torch.bfloat16).double()], 1)

    def expected(self) -> Tensor:
        pairs = zip(self.pools, self.lists, strict=True)
        return exact(self.q, torch.cat([self._tokens(pool, lists[0]) for pool, lists in pairs]), self.scale, self.sinks)

    def own_call(self) -> Call:
        (first, second), (cache, extra) = self.lists, self.pools
        run = run_of(self.case, first, CKV, kv_row_format="deepseek_v4", sm_scale=self.scale, extra_indices=second)
        given = {"query": self.q, "kv_cache": cache, "extra_kv_cache": extra, "sinks": self.sinks, "return_lse": True}
        return lambda: run(**given)[0]

    def flashmla_call(self) -> Call:
        import flash_mla

        schedule, (window, others) = flash_mla.get_mla_metadata()[0], (pool.unsqueeze(2) for pool in self.pools)
        given = (self.q.unsqueeze(1), window, None, None, CKV, schedule)
        options = {"indices": self.lists[0].unsqueeze(1), "extra_indices_in_kvcache": self.lists[1].unsqueeze(1)}
        options |= {"extra_k_cache": others, "attn_sink": self.sinks, "softmax_scale": self.scale}
        options |= {"is_fp8_kvcache": True, "use_legacy": True}
        return lambda: flash_mla.flash_mla_with_kvcache(*given, **options)[0][:, 0]


def measure(case: CallCase, device: torch.device, rounds: int, clock: GpuClock | HostClock) -> dict[str, Any]:
    torch.manual_seed(0)
    batch = Decode(case, device) if case.window else Prefill(case, device)
    calls = {"flashpage": batch.own_call()}
    if device.type == "cuda" and importlib.util.find_spec("flash_mla"):
        calls["FlashMLA"] = batch.flashmla_call()
    expected, errors, refused = batch.expected(), {}, {}
    for name, call in list(calls.items()):
        try:
            errors[name] = float(f"{(call()[0].double() - expected).norm() / expected.norm():.3g}")
        except RuntimeError as failure:
            if name == "flashpage":
                raise
            refused[name] = str(failure).splitlines()[0][:200]
            del calls[name]
    timed = {name: clock.capture(call) for name, call in calls.items()} if case.window else calls
    us = {name: round(statistics.median(spent), 1) for name, spent in rounds_of(timed, rounds, clock).items()}
    print(f"| {case.name} | " + " | ".join(f"{name} {time} ({errors[name]})" for name, time in us.items()), flush=True)
    return {"us": us, "errors": errors, "refused": refused}


if __name__ == "__main__":
    main_of("sparse-calls", __doc__, CASES, measure)
