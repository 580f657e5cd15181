"""BatchMLASparseAttentionWrapper: lists of each layer, lengths, plans for other rows, two caches, and refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import flashpage
from flashpage import CapabilityError, PlanError, RunError

pytestmark = pytest.mark.usefixtures("quick_kernels")

CKV, KPE, HEADS, PAGE, PAGES, ROWS, TOPK = 64, 16, 4, 8, 6, 3, 10
OPTIONS: dict[str, Any] = {"num_heads": HEADS, "head_dim_ckv": CKV, "head_dim_kpe": KPE, "page_size": PAGE}
OPTIONS |= {"sm_scale": 0.1, "q_data_type": torch.float32}


def made(**options: Any) -> flashpage.BatchMLASparseAttentionWrapper:
    return flashpage.BatchMLASparseAttentionWrapper(torch.empty(4 << 20, dtype=torch.uint8), **options)


@pytest.fixture
def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, a cache and lists."""
    torch.manual_seed(3)
    lists = torch.stack([torch.randperm(PAGES * PAGE)[:TOPK] for _ in range(ROWS)]).int()
    lists[1, 4] = -1
    return torch.randn(ROWS, HEADS, CKV + KPE), torch.randn(PAGES, PAGE, CKV + KPE), lists


def exact(q: torch.Tensor, cache: torch.Tensor, lists: torch.Tensor) -> torch.Tensor:
    rows = cache.flatten(0, 1)[lists.clamp(min=0).long()]
    scores = torch.einsum("rhd,rtd->rht", q, rows) * 0.1
    weights = scores.masked_fill((lists < 0)[:, None], -math.inf).softmax(-1)
    return torch.einsum("rht,rtd->rhd", weights, rows[..., :CKV])


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_each_layer_has_its_lists(tensors: Any) -> None:
    q, cache, lists = tensors
    wrapper, other = made(), lists.flip(0).contiguous()
    wrapper.plan(lists, **OPTIONS)
    close(wrapper.run(query=q, kv_cache=cache), exact(q, cache, lists))
    close(wrapper.run(query=q, kv_cache=cache, indices=other), exact(q, cache, other))
    out, lse = wrapper.run_return_lse(q[..., :CKV], q[..., CKV:], cache[..., :CKV], cache[..., CKV:])
    close(out, exact(q, cache, lists))
    assert lse.shape == (ROWS, HEADS)
    wrapper.plan(lists[:1].reshape(1, 1, TOPK), torch.tensor([4]), **OPTIONS)
    close(wrapper.run(query=q[:1], kv_cache=cache), exact(q[:1], cache, lists[:1, :4]))
    assert "latent" in wrapper.last_plan.explain() or wrapper.last_plan.work_items()


def test_under_compile(tensors: Any) -> None:
    """A run is one operator, which gets the lists of its layer, and of later plans."""
    q, cache, lists = tensors
    wrapper, other = made(), lists.flip(0).contiguous()
    wrapper.plan(lists, **OPTIONS)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def layers(q: torch.Tensor, cache: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        parts = (q[..., :CKV], q[..., CKV:], cache[..., :CKV], cache[..., CKV:])
        return wrapper.run(*parts) + 2 * wrapper.run(query=q, kv_cache=cache, indices=indices)

    close(layers(q, cache, other), exact(q, cache, lists) + 2 * exact(q, cache, other))
    close(layers(q, cache, lists), 3 * exact(q, cache, lists))
    wrapper.plan(other, **OPTIONS)
    close(layers(q, cache, lists), exact(q, cache, other) + 2 * exact(q, cache, lists))


def test_a_window_and_a_list_in_one_softmax(tensors: Any) -> None:
    """Two caches without a launch for both: their states are merged."""
    q, cache, lists = tensors
    states = []
    for part in (lists[:, :4].contiguous(), lists[:, 4:].contiguous()):
        wrapper = made()
        wrapper.plan(part, **OPTIONS)
        states.append(wrapper.run_return_lse(query=q, kv_cache=cache))
    close(flashpage.merge_state(*states[0], *states[1])[0], exact(q, cache, lists))


def test_lengths_on_the_device_are_planned_there(tensors: Any) -> None:
    """On the CPU the same function is called."""
    q, cache, lists = tensors
    wrapper = made()
    wrapper.plan(lists, **OPTIONS)
    wrapper._plan_on_device(lists, torch.tensor([4, 10, 0], dtype=torch.int32), lists.shape[-1])
    out = wrapper.run(query=q, kv_cache=cache)
    close(out[0], exact(q, cache, lists[:, :4])[0])
    close(out[1], exact(q, cache, lists)[1])
    assert out[2].abs().max() == 0


def test_graph_plans_keep_their_rows(tensors: Any) -> None:
    q, cache, lists = tensors
    wrapper = made(use_cuda_graph=True, num_rows=ROWS)
    wrapper.plan(lists, **OPTIONS)
    wrapper.plan(lists, torch.tensor([3, 3, 3]), **OPTIONS)
    close(wrapper.run(query=q, kv_cache=cache), exact(q, cache, lists[:, :3]))
    with pytest.raises(PlanError, match="captured runs read"):
        wrapper.plan(lists[:2], **OPTIONS)


def test_captured_runs_read_the_lists_of_later_plans(tensors: Any) -> None:
    """Their launches hold the address of the first plan's lists, which may be gone by then."""
    q, cache, lists = tensors
    wrapper, other = made(use_cuda_graph=True, num_rows=ROWS), lists.flip(0).contiguous()
    wrapper.plan(lists.clone(), **OPTIONS)
    wrapper.run(query=q, kv_cache=cache)
    address = wrapper._attention._local.bound.params.kv_indices
    wrapper.plan(other, **OPTIONS)
    close(wrapper.run(query=q, kv_cache=cache), exact(q, cache, other))
    assert wrapper._attention._local.bound.params.kv_indices == address != other.data_ptr()
    with pytest.raises(PlanError, match=r"indices has shape \(3, 8\) but captured runs read \(3, 10\)"):
        wrapper.plan(lists[:, :8].contiguous(), **OPTIONS)


@pytest.mark.parametrize(
    ("lists", "lens", "options", "says"),
    [
        (torch.zeros(ROWS, TOPK), None, {}, "pass contiguous int32"),
        (torch.zeros(TOPK, dtype=torch.int32), None, {}, "indices has shape"),
        (torch.zeros(ROWS, TOPK, dtype=torch.int32), torch.tensor([1, 2]), {}, r"one entry a row \(3\)"),
        (
            torch.zeros(ROWS, TOPK, dtype=torch.int32),
            torch.tensor([1, 2, 11]),
            {},
            r"^topk_length\[2\]=11 but each list has 10 entries: pass 0 to 10",
        ),
        (torch.zeros(ROWS, TOPK, dtype=torch.int32), torch.tensor([1, -2, 3]), {}, r"topk_length\[1\]=-2"),
        (torch.zeros(ROWS, TOPK, dtype=torch.int32), None, {"sm_scale": None}, "sm_scale"),
        (torch.zeros(ROWS, TOPK, dtype=torch.int32), None, {"head_dim_kpe": 72}, "head_dim_kpe 72"),
    ],
)
def test_refused_plans(lists: Any, lens: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises((PlanError, CapabilityError), match=says):
        made().plan(lists, lens, **(OPTIONS | options))


def test_graphs_need_their_rows() -> None:
    with pytest.raises(PlanError, match="^use_cuda_graph=True needs num_rows: pass the rows of q in every batch.$"):
        made(use_cuda_graph=True)


def test_refused_runs(tensors: Any) -> None:
    q, cache, lists = tensors
    wrapper = made()
    with pytest.raises(RunError, match="no plan"):
        wrapper.run(query=q, kv_cache=cache)
    wrapper.plan(lists, **OPTIONS)
    for given, says in (
        ({"indices": lists[:2]}, "plan again"),
        ({"indices": lists + PAGES * PAGE}, "the cache has 48 tokens"),
        ({"indices": lists.long()}, "contiguous int32"),
        ({"kv_cache": cache[:, :4]}, "^kv_cache has pages of 4 tokens but"),
        ({"kv_cache": cache[..., :72]}, "^kv_cache has rows of 72 columns but the plan is for 80"),
        ({"query": q[:2]}, "query has 2 rows"),
        ({"query": torch.cat([q, q], 1)}, "8 heads but the plan is for num_heads=4"),
        ({"query": (q[..., CKV:], q[..., :CKV])}, r"^query\[0\] has 16 columns but .* columns first"),
        ({"ckv_scale": 0.0}, "ckv_scale=0.0"),
    ):
        with pytest.raises((RunError, CapabilityError), match=says):
            wrapper.run(**({"query": q, "kv_cache": cache} | given))


def test_a_refused_plan_changes_no_list(tensors: Any) -> None:
    """Runs after a refused plan would read beyond its shorter lists."""
    q, cache, lists = tensors
    wrapper = made()
    wrapper.plan(lists, **OPTIONS)
    with pytest.raises(PlanError, match="topk_length"):
        wrapper.plan(lists[:1].flip(1).contiguous(), torch.tensor([TOPK + 1]), **OPTIONS)
    close(wrapper.run(query=q, kv_cache=cache), exact(q, cache, lists))
    with pytest.raises(PlanError, match="num_heads"):
        wrapper.plan(lists[:1], **(OPTIONS | {"num_heads": 0}))
    with pytest.raises(RunError, match="no plan"):
        wrapper.run(query=q, kv_cache=cache)


def test_lists_without_entries_or_memory(tensors: Any) -> None:
    q, cache, lists = tensors
    wrapper = made()
    wrapper.plan(lists[:, :0], **OPTIONS)
    assert wrapper.run(query=q, kv_cache=cache, return_lse=True)[1].isneginf().all()
    wrapper.plan(lists, **OPTIONS)
    lists.untyped_storage().resize_(0)
    with pytest.raises(RunError, match="indices needs"):
        wrapper.run(query=q, kv_cache=cache)
