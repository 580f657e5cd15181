"""Accuracy of caches in each format: the error of decode's output against fp64 over unquantised rows.

Data: `normal`; `heavy tails`, Student's t with three degrees of freedom; `outlier channels`, normal but for four
channels of K that are ten times larger, as those of real models are. A row's error is |output - exact| / |exact|.

    python tests/bench/format_accuracy.py --json accuracy.jsonl
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from record import Recorder

import flashpage
from flashpage.kernels.kv_formats import FORMATS

BATCH, TOKENS, HEADS, KV_HEADS, DIM, PAGE = 4, 1024, 8, 2, 128, 16
DATA = ("normal", "heavy tails", "outlier channels")


def rows(kind: str, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, K and V of bf16 values, [rows, heads, dim]."""

    def draw(count: int, heads: int) -> torch.Tensor:
        found = torch.randn(count, heads, DIM, generator=generator)
        if kind == "heavy tails":  # a normal number over the root of a mean of three squares
            found /= torch.randn(count, heads, DIM, 3, generator=generator).square().mean(-1).sqrt()
        return found

    q, k, v = draw(BATCH, HEADS), draw(BATCH * TOKENS, KV_HEADS), draw(BATCH * TOKENS, KV_HEADS)
    if kind == "outlier channels":
        k[..., torch.randperm(DIM, generator=generator)[:4]] *= 10
    return q.bfloat16(), k.bfloat16(), v.bfloat16()


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    group = HEADS // KV_HEADS
    k, v = (part.view(BATCH, TOKENS, KV_HEADS, DIM).double().repeat_interleave(group, 2) for part in (k, v))
    scores = torch.einsum("bhd,bthd->bht", q.double(), k) * DIM**-0.5
    return torch.einsum("bht,bthd->bhd", scores.softmax(-1), v)


def cache_of(name: str, k: torch.Tensor, v: torch.Tensor, places: tuple[torch.Tensor, ...]) -> tuple[Any, Any, Any]:
    """The cache, kv_cache_sf, and the other arguments of run; the appends quantise."""
    row, pages = FORMATS[name], BATCH * TOKENS // PAGE
    stored = getattr(torch, row.stored[0])
    shape = (pages, PAGE, KV_HEADS)
    cache = tuple(torch.zeros(*shape, row.stored_columns(DIM), dtype=stored, device=k.device) for _ in "kv")
    last = (row.row_scales(DIM),) if row.row_scales(DIM) > 1 else ()
    kind = getattr(torch, row.scales[0])
    scales = tuple(torch.zeros(*shape, *last, dtype=kind, device=k.device) for _ in "kv")
    numbers = {}
    if name == "nvfp4":  # so that the largest block's scale is e4m3's largest number
        numbers = {"k_scale": float(k.abs().max()) / (6 * 448), "v_scale": float(v.abs().max()) / (6 * 448)}
    flashpage.append_paged_kv_cache(
        k, v, *places[:2], cache, *places[2:], kv_format=name, kv_cache_sf=scales, **numbers
    )
    return cache, scales, numbers


def error_of(name: str, kind: str, device: str) -> float:
    """The mean error over heads and requests; `name`: a format, or an element type."""
    q, k, v = (part.to(device) for part in rows(kind, torch.Generator().manual_seed(0)))
    expected = exact(q, k, v)
    numbers = {"dtype": torch.int32, "device": device}
    indptr, last = torch.arange(BATCH + 1, **numbers) * (TOKENS // PAGE), torch.full((BATCH,), PAGE, **numbers)
    indices = torch.arange(BATCH * TOKENS // PAGE, **numbers)
    token = torch.arange(BATCH * TOKENS, **numbers)
    places = (token // TOKENS, token % TOKENS, indices, indptr, last)
    wrapper = flashpage.BatchDecodeWithPagedKVCacheWrapper(torch.empty(64 << 20, dtype=torch.uint8, device=device))
    types: dict[str, Any] = {"q_data_type": torch.bfloat16}
    if name in FORMATS:
        cache, scales, run = cache_of(name, k, v, places)
        wrapper.plan(indptr, indices, last, HEADS, KV_HEADS, DIM, PAGE, **types, kv_format=name)
        found = wrapper.run(q, cache, kv_cache_sf=scales, **run)
    else:
        dtype = getattr(torch, name)
        is_fp8 = dtype.itemsize == 1
        most = [float(part.abs().max()) / 448 if is_fp8 else 1.0 for part in (k, v)]
        cache = tuple(
            (part.float() / scale).to(dtype).view(-1, PAGE, KV_HEADS, DIM)
            for part, scale in zip((k, v), most, strict=True)
        )
        wrapper.plan(indptr, indices, last, HEADS, KV_HEADS, DIM, PAGE, **types, kv_data_type=dtype)
        found = wrapper.run(q, cache, k_scale=most[0], v_scale=most[1])
    return float(((found.double() - expected).norm(dim=-1) / expected.norm(dim=-1)).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", metavar="FILE", help="appends the figures as lines of data")
    arguments = parser.parse_args()
    recorder = Recorder(arguments.json)
    print(f"{'format':20}", *(f"{kind:>18}" for kind in DATA))
    for name in ("bfloat16", "float8_e4m3fn", *FORMATS):
        errors = {kind: error_of(name, kind, arguments.device) for kind in DATA}
        print(f"{name:20}", *(f"{errors[kind]:18.2%}" for kind in DATA))
        recorder.add("format-accuracy", name, errors={kind: round(error, 5) for kind, error in errors.items()})


if __name__ == "__main__":
    main()
