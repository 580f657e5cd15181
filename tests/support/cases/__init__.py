"""The case table. Each row's `why` says what it covers.

The CPU backend and every CUDA kernel run the same rows (tests/kernels/test_cases.py, tests/support/harness.py). To
share compiled kernels, most rows use head dim 64 and one of few dtype pairs, and vary run-time options.
"""

from __future__ import annotations

from . import (
    chunks,
    columns,
    few_rows,
    formats,
    fp8_outputs,
    fp8_prefill,
    fp8_queries,
    gathered,
    latent,
    long,
    options,
    pairs,
    rotated,
    shapes,
)
from .case import Case

CASES: list[Case] = [
    *shapes.rows(),
    *few_rows.rows(),
    *options.rows(),
    *pairs.rows(),
    *chunks.rows(),
    *fp8_queries.rows(),
    *fp8_prefill.rows(),
    *fp8_outputs.rows(),
    *long.rows(),
    *gathered.rows(),
    *rotated.rows(),
    *columns.rows(),
    *latent.rows(),
    *formats.rows(),
]
REDUCED: list[Case] = [case for case in CASES if case.reduced]  # a short table for compute-sanitizer
