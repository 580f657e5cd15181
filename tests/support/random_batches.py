"""Random batches for the planner, and random ways to divide them."""

from __future__ import annotations

import numpy as np
from planner_batches import Batch, Cutting


def random_kv_lens(rng: np.random.Generator, count: int) -> np.ndarray:
    kind = rng.integers(0, 5)
    lens = (
        rng.lognormal(6, 1.5, count),
        np.full(count, rng.integers(1, 5000)),
        np.where(np.arange(count) == count // 2, 100_000, rng.integers(1, 300)),
        rng.integers(0, 3000, count),
        rng.zipf(1.5, count).clip(max=50_000),
    )[kind]
    return lens.astype(np.int64) * (rng.random(count) > 0.1)


def random_case(rng: np.random.Generator) -> tuple[Batch, Cutting]:
    count = int(rng.integers(0, 50))
    num_kv_heads, group = int(rng.choice([1, 2, 3, 4, 5, 6, 8, 12])), int(rng.choice([1, 2, 3, 4, 7, 8, 40]))
    decode = rng.random() < 0.5
    q_lens = (
        np.ones(count, np.int64) if decode else rng.choice([0, 1, 1, 2, 5, 17, 64, 129, 300], count).astype(np.int64)
    )
    batch = Batch(
        q_lens,
        random_kv_lens(rng, count),
        num_q_heads=num_kv_heads * group,
        num_kv_heads=num_kv_heads,
        page_size=int(rng.choice([0, 1, 2, 16, 64, 256])),
        causal=bool(rng.random() < 0.5),
        window_left=int(rng.choice([-1, -1, 0, 5, 100, 1000])),
        has_custom_mask=bool(rng.random() < 0.2),
        has_mask_tiles=bool(rng.random() < 0.2),
        q_start=int(rng.integers(0, 3)),
        kv_start=int(rng.integers(0, 3)),
    )
    cutting = Cutting(
        num_ctas=int(rng.integers(1, 265)),
        heads_on_axis=int(rng.integers(0, 2)),
        tile_q=int(rng.choice([16, 32, 64, 128])),
        tile_kv=int(rng.choice([16, 48, 64, 128])),
        ns_per_token=float(rng.choice([0, 1, 4, 12, 28])),
        ns_per_unit=float(rng.choice([0, 200, 400, 1500])),
        few_rows_cost=float(rng.choice([1.0, 0.5])),
        ns_per_piece=float(rng.choice([0, 1500, 5000])),
        min_piece_tokens=int(rng.choice([1, 128, 256])),
        max_pieces=int(rng.choice([0, 0, 0, 2, 8, 32])),
        fixed_piece_tokens=int(rng.choice([0, 0, 0, 0, -1, 100, 512])),
        merge_rows=int(rng.choice([1, 8, 64])),
        wave_tokens=int(rng.choice([0, 0, 3000, 32768])),
        least_ns_of_unit=float(rng.choice([0, 0, 2300])),
    )
    return batch, cutting
