"""Differential fuzzing: random batches and options against the fp64 reference, over all wrappers, formats and backends.

`make fuzz MINUTES=30` runs longer, from a new seed each time, and CI for half a minute; `FUZZ_MINUTES=60 pytest -s
tests/net/test_fuzz.py -k latents` gives all of the time to one strategy. A row that failed is kept as a regression
test: put what the failure prints into KEPT, with a comment that says what was wrong.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from typing import Any

import fuzz
import fuzz_graphs
import fuzz_latent
import fuzz_states
import fuzz_wrappers
import pytest
import torch
from cascade_batch import CascadeBatch, CascadeCase, planned
from cases.case import Case
from harness import run_case
from hypothesis import HealthCheck, given, seed, settings
from hypothesis.errors import HypothesisException
from vllm_blocks import BlockCase, Blocks

from flashpage import CapabilityError, vllm_ops

pytestmark = pytest.mark.usefixtures("quick_kernels")

SEED = int(os.environ.get("FUZZ_SEED", "1"))
FORMATS_OF_A_ROUND, EXAMPLES_OF_A_ROUND, LEAST_ROUNDS = 6, 40, 9
Strategy = Callable[[list[fuzz.Format]], Any]


def check_cascade(row: CascadeCase, device: str) -> None:
    batch = CascadeBatch(row)
    wrapper = planned(batch, device)
    batch.check(*wrapper.run(batch.q.to(device), batch.cache.argument(device), return_lse=True))


def check_blocks(row: BlockCase, device: str) -> None:
    found = Blocks(row)
    out = found.out(device)
    vllm_ops.paged_attention_v1(out, *found.arguments(device))
    found.check(out)


# Rows of other types check themselves.
CHECKS: dict[type, Callable[[Any, str], Any]] = {Case: run_case, CascadeCase: check_cascade, BlockCase: check_blocks}
STRATEGIES: list[Strategy] = [fuzz.cases, fuzz.cascades, fuzz.blocks, fuzz_graphs.graphs]
STRATEGIES += [fuzz_wrappers.pods, fuzz_wrappers.mixed, fuzz_wrappers.matrices, fuzz_wrappers.variable_matrices]
STRATEGIES += [fuzz_states.appends, fuzz_states.merges]
STRATEGIES += [fuzz_latent.latents, fuzz_latent.two_caches, fuzz_latent.latent_graphs]
SECONDS = float(os.environ.get("FUZZ_MINUTES", "0.08")) * 60  # of all strategies that run

KEPT: list[Any] = [
    # Right, but beyond the bound of an LSE, which took the mean of what rounding q and K does to scores.
    Case(
        *("one-token-lse", "RoPE over e4m3, rows that see one token", (90,), (69,), "single_prefill", 24, 3),
        kv_dtype="float8_e4m3fn",
        page_size=1,
        causal=True,
        window_left=0,
        position="ROPE_LLAMA",
        outputs="returned",
    ),
    # Right, but taken for an output that was rounded to 16 bits: it is the value of one token, as it was read.
    fuzz_latent.LatentRow(
        Case(
            *("one-token-out", "fp32 outputs over e4m3 rows, a row that sees one token", (1,), (1,), "latent", 1, 1),
            *(576, 512),
            kv_dtype="float8_e4m3fn",
            o_dtype="float32",
            row_format="tokens-uneven",
            sm_scale=192**-0.5,
        ),
        name="one-token-out",
    ),
    # As before, with a sink: products of the token's weight and one of e4m3's eight significands have few bits. Numbers
    # are drawn by the case's name.
    fuzz_latent.LatentRow(
        Case(
            *("fuzz", "fp32 outputs over e4m3 rows, a token and a sink", (0, 2), (0, 64), "latent", 24, 1),
            *(192, 128),
            kv_dtype="float8_e4m3fn",
            o_dtype="float32",
            row_format="numbers",
            selected="padded",
            page_size=1,
            cache="interleaved",
            sm_scale=192**-0.5,
            sinks=True,
        ),
        name="one-token-sink",
    ),
    # A sum of two tokens whose weights are equal in bf16 has few bits, too.
    fuzz_latent.LatentRow(
        Case(
            *(
                "fuzz",
                "fp32 outputs over e4m3 rows, two tokens",
                (31, 60, 88, 16, 0),
                (1, 8, 17, 33, 4),
                "latent",
                40,
                1,
            ),
            *(576, 512),
            kv_dtype="float8_e4m3fn",
            o_dtype="float32",
            row_format="tensors",
            page_size=1,
            cache="interleaved",
            causal=True,
            sm_scale=192**-0.5,
        ),
        name="two-tokens-out",
    ),
]


@pytest.mark.parametrize("row", KEPT, ids=lambda row: row.name)
def test_what_once_failed(row: Any, device: str) -> None:
    check(row, device)


def check(row: Any, device: str) -> None:
    if type(row) in CHECKS:
        CHECKS[type(row)](row, device)
    else:
        row.check(device)


def rounds(strategy: Strategy, device: str, seconds: float) -> int:
    """Draws rows until the time is over, and on a slow machine until one row is compared; returns how many were."""
    end, compared, number = time.monotonic() + seconds, 0, SEED
    while time.monotonic() < end or (not compared and number < SEED + LEAST_ROUNDS):
        compared += compare_rows(strategy, device, number, end)
        number += 1
    return compared


def compare_rows(strategy: Strategy, device: str, number: int, end: float) -> int:
    """Compares the rows of seed `number`; returns how many. After `end` the rest is skipped, unless no row was compared
    yet, or one has failed, and hypothesis is looking for a smaller row that fails, too."""
    compared, has_failed = 0, False

    @seed(number)
    @settings(
        max_examples=EXAMPLES_OF_A_ROUND,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy(fuzz.formats(device, random.Random(number), FORMATS_OF_A_ROUND)))
    def look(row: Any) -> None:
        nonlocal compared, has_failed
        if time.monotonic() > end and compared and not has_failed:
            return
        try:
            check(row, device)
        except CapabilityError:
            return  # no kernel supports this combination
        except (HypothesisException, KeyboardInterrupt):
            raise
        except Exception as error:
            has_failed = True
            raise AssertionError(f"seed {number}: {fuzz.shown(row)}: {error}") from error
        compared += 1

    look()
    return compared


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.__name__)
def test_random_rows(strategy: Any, device: str, request: pytest.FixtureRequest) -> None:
    torch.set_num_threads(1)
    running = sum(getattr(item, "originalname", "") == "test_random_rows" for item in request.session.items)
    compared = rounds(strategy, device, SECONDS / running)
    print(f"{strategy.__name__} on {device}: {compared} rows")
    assert compared > 0, "nothing was compared"
