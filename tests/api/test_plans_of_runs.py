"""Plans that runs make again, and values that forward keeps: failures, and tensors that change in between."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from wrong_arguments import ints, workspace

import flashpage
from flashpage import CapabilityError, CompileError, KernelMissingError, PlanError, RunError
from flashpage.base.errors import FlashpageError
from flashpage.plan import option_plan

HEADS, DIM, PAGE = 2, 64, 16


@pytest.fixture
def cache() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(16, 2, PAGE, HEADS, DIM)


def pod(pages: torch.Tensor) -> Any:
    """A batch of a prefill of 4 rows over 8 tokens, and a decode."""
    wrapper = flashpage.pod.BatchPODWithPagedKVCacheWrapper(workspace())
    prefill, decode = (ints(0, 4), ints(0, 1), pages, ints(8)), (ints(0, 1), ints(0, 1), ints(5), ints(9))
    wrapper.plan(*prefill, *decode, HEADS, HEADS, DIM, PAGE, q_data_type=torch.float32)
    return wrapper


def test_a_mask_that_a_run_refuses_is_the_end_of_that_run_only(cache: torch.Tensor) -> None:
    wrapper, q, row = pod(ints(3)), torch.randn(4, HEADS, DIM), torch.randn(1, HEADS, DIM)
    expected = wrapper.run(q, cache, row, cache)
    with pytest.raises(PlanError, match="custom_mask_p has 7 values"):
        wrapper.run(q, cache, row, cache, custom_mask_p=torch.ones(7, dtype=torch.bool))
    found = wrapper.run(q, cache, row, cache)
    assert all(map(torch.equal, found, expected))


def test_a_run_that_plans_again_has_the_page_numbers_of_the_plan(cache: torch.Tensor) -> None:
    pages, q, row = ints(3), torch.randn(4, HEADS, DIM), torch.randn(1, HEADS, DIM)
    wrapper = pod(pages)
    expected, _ = wrapper.run(q, cache, row, cache)
    pages.fill_(9)
    found, _ = wrapper.run(q, cache, row, cache, custom_mask_p=torch.ones(4 * 8, dtype=torch.bool))
    assert torch.allclose(found, expected, atol=1e-6)


def test_a_forward_of_another_type_has_the_page_numbers_of_its_batch(cache: torch.Tensor) -> None:
    shared, row, found = torch.randn(8, HEADS, DIM), torch.randn(1, HEADS, DIM), []
    for later in (3, 9):
        wrapper, pages = flashpage.cascade.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(workspace()), ints(3)
        wrapper.begin_forward(ints(0, 1), pages, ints(9), HEADS, HEADS, DIM, PAGE)  # float16
        pages.fill_(later)
        found.append(wrapper.forward(row, shared, shared, cache))  # float32 is planned now
    assert torch.equal(*found)


def test_the_mask_of_one_request_has_its_scores_shape() -> None:
    """The transposed mask has as many values."""
    q, k = torch.randn(4, HEADS, DIM), torch.randn(6, HEADS, DIM)
    mask = torch.rand(4, 6) < 0.7
    expected = flashpage.single_prefill_with_kv_cache(q, k, k, custom_mask=mask)
    assert torch.equal(flashpage.single_prefill_with_kv_cache(q, k, k, custom_mask=mask.flatten()), expected)
    with pytest.raises(PlanError, match=r"custom_mask has shape \(6, 4\): pass \[4, 6\], or its values joined"):
        flashpage.single_prefill_with_kv_cache(q, k, k, custom_mask=mask.T)
    wrapper = flashpage.pod.PODWithPagedKVCacheWrapper(workspace())
    wrapper.plan(ints(0, 1), ints(5), ints(9), HEADS, HEADS, DIM, PAGE, q_data_type=torch.float32)
    with pytest.raises(PlanError, match=r"custom_mask_p has shape \(6, 4\)"):
        wrapper.run(q, k, k, q[:1], torch.randn(16, 2, PAGE, HEADS, DIM), custom_mask_p=mask.T)


def _block_sparse() -> tuple[Any, tuple[Any, ...]]:
    wrapper, q = flashpage.sparse.BlockSparseAttentionWrapper(workspace()), torch.randn(4, HEADS, DIM)
    wrapper.plan(ints(0, 1), ints(0), 4, 4, 4, 4, HEADS, HEADS, DIM, q_data_type=torch.float32)
    return wrapper, (q, q, q)


def _variable_sparse() -> tuple[Any, tuple[Any, ...]]:
    wrapper, q = flashpage.sparse.VariableBlockSparseAttentionWrapper(workspace()), torch.randn(HEADS, 4, DIM)
    sizes = torch.full((HEADS, 1), 4)
    wrapper.plan(torch.ones(HEADS, 1, 1).bool(), sizes, sizes, HEADS, HEADS, DIM, q_data_type=torch.float32)
    return wrapper, (q, q, q)


def _paged() -> tuple[Any, tuple[Any, ...]]:
    wrapper = flashpage.BatchPrefillWithPagedKVCacheWrapper(workspace())
    wrapper.plan(ints(0, 4), ints(0, 1), ints(0), ints(4), HEADS, HEADS, DIM, PAGE, q_data_type=torch.float32)
    return wrapper, (torch.randn(4, HEADS, DIM), torch.randn(1, 2, PAGE, HEADS, DIM))


@pytest.mark.parametrize("make", [_block_sparse, _variable_sparse, _paged], ids=lambda f: f.__name__.strip("_"))
@pytest.mark.parametrize(
    "wrong", [{"sm_scale": "x"}, {"pos_encoding_mode": "X"}, {"rope_scale": -1.0}, {"logits_soft_cap": "x"}], ids=str
)
def test_a_forward_that_fails_changes_no_later_run(make: Any, wrong: dict[str, Any]) -> None:
    wrapper, tensors = make()
    expected = wrapper.run(*tensors)
    with pytest.raises((PlanError, RunError), match=next(iter(wrong))):
        wrapper.forward(*tensors, **wrong)
    assert torch.equal(wrapper.run(*tensors), expected)


@pytest.mark.parametrize("error", [KernelMissingError, CapabilityError, CompileError], ids=lambda e: e.__name__)
def test_a_missing_kernel_for_options_of_a_run_ends_no_plan(
    error: type[FlashpageError], cache: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run used a window, whose kernel for more rows is missing: plans succeed, and runs with the window raise."""
    prepare = option_plan.prepare

    def without_windows(options: Any, rows: int, *args: Any) -> Any:
        if options.window_left == 3 and rows > 16:
            raise error("no kernel for windows")
        return prepare(options, rows, *args)

    wrapper = flashpage.BatchPrefillWithPagedKVCacheWrapper(workspace())

    def plan(rows: int) -> torch.Tensor:
        pages = ints(0, 16), ints(*range(16)), ints(PAGE)
        wrapper.plan(ints(0, rows), *pages, HEADS, HEADS, DIM, PAGE, causal=True, q_data_type=torch.float32)
        return torch.randn(rows, HEADS, DIM)

    wrapper.run(plan(1), cache, window_left=3)
    monkeypatch.setattr(option_plan, "prepare", without_windows)
    for _ in range(2):
        q = plan(200)
        assert torch.isfinite(wrapper.run(q, cache)).all()
        with pytest.raises(error, match="no kernel for windows"):
            wrapper.run(q, cache, window_left=3)
    wrapper.run(plan(1), cache, window_left=3)
