"""The case table: every row is there for the reason in its `why`.

The CPU backend and every CUDA kernel run the same rows (tests/test_cases.py, tests/harness.py). Compiled kernels are
shared: most rows use head dim 64 and one of few dtype pairs, and vary what is given at run time.
"""

from __future__ import annotations

import case_few_rows
import case_fp8_prefill
import case_fp8_queries
import case_gathered
import case_long
import case_options
import case_pairs
import case_shapes
from case import Case

CASES: list[Case] = [
    *(*case_shapes.rows(), *case_few_rows.rows(), *case_options.rows(), *case_pairs.rows()),
    *case_fp8_queries.rows(),
    *case_fp8_prefill.rows(),
    *case_long.rows(),
    *case_gathered.rows(),
]
REDUCED: list[Case] = [case for case in CASES if case.reduced]  # a short table for compute-sanitizer
