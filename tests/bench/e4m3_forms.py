"""Prefill over an e4m3 cache in four forms, next to bf16: e4m3 factors of both products, K and V widened by each warp,
each tile widened once, and all pages widened by launches of their own.

On Hopper it asks what a card without wgmma would do, planned as one. `--small --device cpu` runs tiny shapes: it only
shows that the program works.

    FLASHPAGE_CARD="RTX 4090" python tests/bench/e4m3_forms.py --json e4m3_forms.jsonl
"""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

import torch
from gpu import GpuClock, HostClock, rounds_of
from peers import Call
from sparse import main_of

import flashpage

HEADS, KV_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 16
CACHE = torch.float8_e4m3fn


@dataclasses.dataclass(frozen=True)
class FormCase:
    batch: int
    rows: int  # of each request, and its tokens

    @property
    def name(self) -> str:
        return f"page {PAGE}, {self.batch} x {self.rows:,}"

    def shrunk(self) -> FormCase:
        return FormCase(1, 64)


CASES = (FormCase(1, 16384), FormCase(4, 4096), FormCase(16, 1024))


def wrapper_of(case: FormCase, device: torch.device, **kinds: Any) -> Any:
    workspace = torch.empty(256 << 20 if device.type == "cuda" else 16 << 20, dtype=torch.uint8, device=device)
    wrapper, pages = flashpage.BatchPrefillWithPagedKVCacheWrapper(workspace), case.rows // PAGE
    numbers = torch.arange(case.batch * pages + 1, dtype=torch.int32, device=device)
    last = torch.full((case.batch,), PAGE, dtype=torch.int32, device=device)
    lists = numbers[: case.batch + 1] * case.rows, numbers[: case.batch + 1] * pages, numbers[:-1], last
    wrapper.plan(*lists, HEADS, KV_HEADS, HEAD_DIM, PAGE, causal=True, **kinds)
    return wrapper


def calls_of(case: FormCase, device: torch.device) -> dict[str, Call]:
    torch.manual_seed(0)
    shape = case.batch * case.rows // PAGE, PAGE, KV_HEADS
    q = torch.randn(case.batch * case.rows, HEADS, HEAD_DIM, device=device).bfloat16()
    k, v = (torch.randn(*shape, HEAD_DIM, device=device).bfloat16() for _ in "kv")
    narrow_q, narrow_k, narrow_v = (part.to(CACHE) for part in (q, k, v))
    scales = torch.ones(*shape, device=device), torch.ones(*shape, device=device)
    wide_q, wide_k, wide_v = (torch.empty_like(part) for part in (q, k, v))
    bf16 = wrapper_of(case, device, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16)
    products = wrapper_of(case, device, q_data_type=CACHE, kv_data_type=CACHE)
    by_warps = wrapper_of(case, device, q_data_type=torch.bfloat16, kv_data_type=CACHE)
    by_tiles = wrapper_of(case, device, q_data_type=torch.bfloat16, kv_data_type=CACHE, kv_format="e4m3_token")

    def ahead() -> Any:
        for wide, narrow in ((wide_q, narrow_q), (wide_k, narrow_k), (wide_v, narrow_v)):
            wide.copy_(narrow)
        return bf16.run(wide_q, (wide_k, wide_v))

    return {
        "bf16": lambda: bf16.run(q, (k, v)),
        "e4m3 products": lambda: products.run(narrow_q, (narrow_k, narrow_v)),
        "widened by warps": lambda: by_warps.run(q, (narrow_k, narrow_v)),
        "widened tiles": lambda: by_tiles.run(q, (narrow_k, narrow_v), kv_cache_sf=scales),
        "widened pages": ahead,
    }


def measure(case: FormCase, device: torch.device, rounds: int, clock: GpuClock | HostClock) -> dict[str, Any]:
    calls = calls_of(case, device)
    bf16 = calls["bf16"]().float()
    errors = {name: float((call().float() - bf16).norm() / bf16.norm()) for name, call in calls.items()}
    times = rounds_of({name: clock.capture(call) for name, call in calls.items()}, rounds, clock)
    us = {name: round(statistics.median(found), 1) for name, found in times.items()}
    cells = " | ".join(f"{name} {us[name]:,} ({us['bf16'] / us[name]:.2f})" for name in us)
    print(f"| {case.name} | {cells}", flush=True)
    return {"us": us, "off_bf16": {name: float(f"{error:.2g}") for name, error in errors.items()}}


if __name__ == "__main__":
    main_of("e4m3-forms", __doc__, CASES, measure)
