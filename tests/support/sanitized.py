"""Tests that .ci/sanitize passes to pytest by name: rows of the case table, and threads that plan and run at the same
time."""

from __future__ import annotations

import contextlib
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from bad_inputs.rows import equal, good_arguments
from bad_inputs.scene import Make
from bad_inputs.scenes import scenes
from cases import CASES
from harness import run_case

import flashpage
from flashpage import native

FORMAT = ("bfloat16", "bfloat16", 64, 64, "NONE", 0.0, "")  # one kernel for each source of K and V, and one for masks


def _rows() -> list:
    def form(case):
        return case.q_dtype, case.kv_type, case.head_dim, case.value_dim, case.position, case.soft_cap, case.variant

    return [case for case in CASES if form(case) == FORMAT and max(case.kv_lens, default=0) <= 700][::4]


@pytest.mark.parametrize("case", _rows(), ids=str)
def test_case(case) -> None:
    run_case(case, "cpu")


@pytest.mark.parametrize("name", ["merge_state", "merge_states", "merge_state_in_place", "append_paged_kv_cache"])
def test_function(name: str) -> None:
    scene = scenes()[name]
    scene.run(good_arguments(scene, Make("cpu")))


def test_lengths_of_any_number() -> None:
    """No sum over lengths may overflow before the planner has refused them."""
    numbers = [
        0,
        1,
        2,
        5,
        -1,
        *(sign * 2**bits + more for bits in (31, 40, 62) for sign in (1, -1) for more in (-1, 0)),
    ]
    numbers += [2**63 - 1, -(2**63), 1 - 2**63]
    chosen, pages, planned = random.Random(0), torch.arange(8).int(), 0
    paged = flashpage.BatchPrefillWithPagedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8))
    ragged = flashpage.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8))
    for _ in range(1000):
        count = chosen.randint(1, 4)
        rows, indptr, last = (torch.tensor(chosen.choices(numbers, k=n)) for n in (count, count, count - 1))
        if chosen.random() < 0.5:
            rows, indptr = rows.sort().values, indptr.sort().values
        options = {"causal": True, "q_data_type": torch.float32}
        for wrapper, given in ((paged, (rows, indptr, pages, last, 4, 4, 64, 16)), (ragged, (rows, indptr, 4, 4, 64))):
            with contextlib.suppress(flashpage.PlanError, flashpage.CapabilityError):
                wrapper.plan(*given, **options)
                planned += 1
    assert planned > 50


WRAPPERS = ["BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithRaggedKVCacheWrapper", "BlockSparseAttentionWrapper"]


@pytest.mark.parametrize("name", WRAPPERS)
def test_threads_plan_and_run(name: str) -> None:
    """Each thread has a wrapper of its own. They share one pool of workers, whose size changes meanwhile."""
    scene, make = scenes()[name], Make("cpu")
    _, expected = scene.run(good_arguments(scene, make))
    started = threading.Barrier(5)

    def work() -> None:
        found, _ = scene.run(good_arguments(scene, make))
        started.wait()
        for _ in range(40):
            assert equal(scene.run(good_arguments(scene, make), found, 1)[1], expected)

    def resize() -> None:
        started.wait()
        for count in (1, 3, 2, 4, 0) * 4:
            native.check(native.load().fp_cpu_set_threads(count))

    torch.set_num_threads(1)
    with ThreadPoolExecutor(5) as pool:
        for done in [*(pool.submit(work) for _ in range(4)), pool.submit(resize)]:
            done.result()


def test_threads_run_one_plan() -> None:
    """Any thread may run a plan, one at a time."""
    scene, make = scenes()["BatchDecodeWithPagedKVCacheWrapper"], Make("cpu")
    given = good_arguments(scene, make)
    wrapper, expected = scene.run(given)
    turn = threading.Lock()

    def work() -> None:
        for _ in range(30):
            with turn:
                assert equal(wrapper.run(**given[-1]), expected)

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work) for _ in range(4)]:
            done.result()
