"""Arguments that once crashed the process or silently gave a wrong result: tensors with odd memory, odd values.
tests/support/wrong_arguments.py has the table of arguments that are plainly wrong."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from odd_tensors import ODD, planned
from wrong_arguments import DIM, HEADS, KINDS, KV_HEADS, PAGE, decode_plan, decode_run, ints, ragged_run, workspace

import flashpage
from flashpage import CapabilityError, PlanError, RunError, VariantError
from flashpage.base import tensor_memory


def parts_of(run: dict[str, Any], argument: str, make: Callable[[torch.Tensor], Any]) -> dict[str, Any]:
    """A run's arguments with one of them made odd; the cache is a pair, whose V is odd."""
    if argument == "v" and "paged_kv_cache" in run:
        k, v = run["paged_kv_cache"].unbind(1)
        return run | {"paged_kv_cache": (k.contiguous(), make(v.contiguous()))}
    return run | {argument: make(run[argument])}


@pytest.mark.parametrize("is_second", [False, True])
@pytest.mark.parametrize("argument", ["q", "paged_kv_cache", "v", "out", "lse"])
@pytest.mark.parametrize("kind", ODD)
def test_a_run_refuses_odd_tensors(kind: str, argument: str, is_second: bool) -> None:
    """They are refused at the first run, and at a later run, which would be a single call of a builtin."""
    make, says = ODD[kind]
    run = decode_run() | {"out": torch.empty(2, HEADS, DIM), "lse": torch.empty(2, HEADS)}
    wrapper = planned()
    if is_second:
        wrapper.run(**parts_of(run, argument, lambda t: t))
    with pytest.raises(RunError, match=says) as caught:
        wrapper.run(**parts_of(run, argument, make))
    assert len(str(caught.value)) < 400
    assert wrapper.run(**decode_run()).isfinite().all()


@pytest.mark.parametrize("argument", ["q", "paged_kv_cache", "out"])
def test_a_storage_that_shrinks_between_equal_runs(argument: str) -> None:
    wrapper, run = planned(), decode_run() | {"out": torch.empty(2, HEADS, DIM)}
    whole = torch.stack([run[argument]] * 2)
    run[argument] = whole[1]
    for _ in range(2):
        wrapper.run(**run)
    whole.untyped_storage().resize_(whole[0].nbytes + 4)
    with pytest.raises(RunError, match=rf"{argument} needs .* resized to"):
        wrapper.run(**run)


@pytest.mark.parametrize("kind", ["freed", "shrunk", "cut", "negative"])
def test_captured_tensors_have_memory(kind: str) -> None:
    """They are read in place by every run of a plan."""
    make, says = ODD[kind]
    variant = flashpage.Variant(logit="score + bias[h]", tensors={"bias": make(torch.ones(HEADS))})
    with pytest.raises(VariantError, match=f"captured tensor 'bias' .*{says}"):
        planned(variant=variant).run(**decode_run())


def test_odd_tensors_work_where_they_can() -> None:
    wrapper, run = planned(), decode_run()
    expected = wrapper.run(**run)
    with torch.no_grad():
        assert torch.equal(wrapper.run(torch.nn.Parameter(run["q"]), run["paged_kv_cache"]), expected)
    q = run["q"].clone().requires_grad_()
    assert torch.equal(wrapper.run(q.detach(), run["paged_kv_cache"]), expected)
    assert torch.equal(wrapper.run(torch._neg_view(-run["q"]).resolve_neg(), run["paged_kv_cache"]), expected)
    again = planned(
        indptr=torch._neg_view(-decode_plan()["indptr"]), indices=torch._neg_view(-decode_plan()["indices"])
    )
    assert torch.equal(again.run(**run), expected)


def test_vmap_is_refused() -> None:
    wrapper, run = planned(), decode_run()
    with pytest.raises(RunError, match="torch.vmap"):
        torch.vmap(lambda q: wrapper.run(q, run["paged_kv_cache"]))(torch.stack([run["q"]] * 2))
    v, s = torch.randn(3, 2, HEADS, DIM), torch.randn(3, 2, HEADS)
    with pytest.raises(RunError, match="torch.vmap"):
        torch.vmap(flashpage.merge_state)(v, s, v, s)


class TestCollectives:
    """Parallel engines pass AsyncCollectiveTensors; a run waits for them."""

    @staticmethod
    def under_way(tensor: torch.Tensor) -> Any:
        from torch.distributed._functional_collectives import AsyncCollectiveTensor

        return AsyncCollectiveTensor(tensor)

    @pytest.mark.parametrize("argument", ["q", "paged_kv_cache", "v", "out"])
    def test_run(self, argument: str) -> None:
        run = decode_run() | {"out": torch.zeros(2, HEADS, DIM)}
        wrapper = planned()
        for _ in range(2):
            found = wrapper.run(**parts_of(run, argument, self.under_way))
            assert type(found) is torch.Tensor and torch.equal(found, wrapper.run(**decode_run_like(run)))

    def test_functions(self) -> None:
        v, s = torch.randn(2, HEADS, DIM), torch.randn(2, HEADS)
        found = flashpage.merge_state(self.under_way(v), s, v, self.under_way(s))
        for tensor, expected in zip(found, flashpage.merge_state(v, s, v, s), strict=True):
            assert torch.equal(tensor, expected)


def decode_run_like(run: dict[str, Any]) -> dict[str, Any]:
    return {"q": run["q"], "paged_kv_cache": run["paged_kv_cache"]}


# ---------------------------------------------------------------- what is written


def rows_of(packed: torch.Tensor, i: int) -> torch.Tensor:
    return packed[:, i]


def test_outputs_share_no_memory() -> None:
    wrapper, run = planned(), decode_run()
    memory = torch.zeros(3, HEADS, DIM)
    q, cache = memory[:2].copy_(run["q"]), run["paged_kv_cache"]
    out = torch.empty(2, HEADS, DIM)
    for _ in range(2):
        for given, says in (
            ({"out": memory[1:]}, "out shares memory with q"),
            ({"out": q}, "out shares memory with q"),
            ({"out": cache.view(-1)[: out.numel()].view(out.shape)}, "out shares memory with paged_kv_cache"),
            ({"out": torch.zeros(HEADS, DIM).expand(2, HEADS, DIM)}, "out has strides"),
            ({"out": out, "lse": out.view(-1)[8 : 8 + 2 * HEADS].view(2, HEADS)}, "lse shares memory with out"),
            ({"lse": q.view(-1)[: 2 * HEADS].view(2, HEADS)}, "lse shares memory with q"),
        ):
            with pytest.raises(RunError, match=says):
                wrapper.run(q, cache, **given)
        wrapper.run(q, cache, out=out, lse=torch.empty(2, HEADS))  # the second round runs by the builtin
    # These views of one tensor do not share memory.
    packed = torch.zeros(2, 2, HEADS, DIM)
    rows_of(packed, 0).copy_(q)
    for _ in range(2):
        wrapper.run(rows_of(packed, 0), cache, out=rows_of(packed, 1))
        assert torch.equal(rows_of(packed, 1), out) and torch.equal(rows_of(packed, 0), q)


def test_overlap_is_found_exactly() -> None:
    """Compared with a search of all elements."""
    generator = torch.Generator().manual_seed(3)
    memory = torch.zeros(64)
    verdicts = set()
    for _ in range(600):
        sizes, strides, offsets = (torch.randint(1, n, (6,), generator=generator).tolist() for n in (4, 12, 20))
        tensors = [memory.as_strided(sizes[i : i + 2], strides[:2], offsets[i]) for i in (0, 3)]
        try:
            tensor_memory.check_written(tensors[0], "out", RunError)
            tensor_memory.check_written(tensors[1], "q", RunError)
        except RunError:
            continue
        places = [
            set(torch.arange(64).as_strided(t.shape, t.stride(), t.storage_offset()).flatten().tolist())
            for t in tensors
        ]
        shares = bool(places[0] & places[1])
        try:
            tensor_memory.check_apart(tensors[0], "out", tensors[1], "q", RunError)
            assert not shares, (sizes, strides, offsets)
        except RunError:
            assert shares, (sizes, strides, offsets)
        verdicts.add(shares)
    assert verdicts == {False, True}


def test_writes_are_counted() -> None:
    """autograd must refuse a tensor that was written after it was saved for backward."""
    wrapper, run = planned(), decode_run()
    out, lse = torch.empty(2, HEADS, DIM), torch.empty(2, HEADS)
    for _ in range(3):
        before = out._version, lse._version
        wrapper.run(**run, out=out, lse=lse)
        assert out._version > before[0] and lse._version > before[1]
    weight = torch.ones(2, HEADS, DIM, requires_grad=True)
    product = (weight * out).sum()
    wrapper.run(**run, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    s, before = torch.randn(2, HEADS), out._version
    flashpage.merge_state_in_place(out, lse, torch.randn(2, HEADS, DIM), s)
    assert out._version > before
    with torch.inference_mode():
        wrapper.run(**run, out=torch.empty(2, HEADS, DIM))
        wrapper.run(**run, out=torch.empty(2, HEADS, DIM))


# ---------------------------------------------------------------- between plan and run


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_index_tensors_may_change_after_plan(dtype: torch.dtype) -> None:
    plan = {name: t.to(dtype) if isinstance(t, torch.Tensor) else t for name, t in decode_plan().items()}
    wrapper, run = planned(**plan), decode_run()
    expected = planned().run(**run)
    for name in ("indptr", "indices", "last_page_len"):
        plan[name].fill_(2**30)
    assert torch.equal(wrapper.run(**run), expected)
    wrapper.plan(**decode_plan())  # a second plan is one foreign call
    again = decode_plan()
    wrapper.plan(**again)
    again["indices"].fill_(2**30)
    assert torch.equal(wrapper.run(**run), expected)


def test_masks_may_change_after_plan() -> None:
    _name, _plan_arguments, run_arguments = KINDS["prefill"]
    run = run_arguments()
    bits = torch.randint(0, 256, (11,), dtype=torch.uint8)
    wrapper = planned("prefill", packed_custom_mask=bits)
    expected = wrapper.run(**run)
    bits.zero_()
    assert torch.equal(wrapper.run(**run), expected)


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps])
def test_wrappers_are_not_copied(way: Callable[[Any], Any]) -> None:
    wrappers = [planned(kind) for kind in KINDS]
    wrappers += [flashpage.BatchAttention(device="cpu"), flashpage.BlockSparseAttentionWrapper(workspace())]
    wrappers += [flashpage.MultiLevelCascadeAttentionWrapper(2, workspace()), wrappers[0]._attention]
    wrappers += [flashpage.BatchPODWithPagedKVCacheWrapper(workspace())]
    for wrapper in wrappers:
        with pytest.raises(CapabilityError, match=f"{type(wrapper).__name__} is neither copied nor pickled"):
            way(wrapper)


@pytest.mark.parametrize("kind", ["prefill", "ragged"])
def test_rows_that_no_request_has_are_empty(kind: str) -> None:
    _name, plan_arguments, run_arguments = KINDS[kind]
    plan, run = plan_arguments(), run_arguments()
    expected = planned(kind).run(**run, return_lse=True)
    wrapper = planned(kind, qo_indptr=plan["qo_indptr"] + 3)
    q = torch.cat([torch.randn(3, HEADS, DIM), run.pop("q")])
    for _ in range(3):
        torch.empty(8, HEADS, DIM).fill_(7.0)  # memory that the next output may get
        out, lse = wrapper.run(q, **run, return_lse=True)
        assert not out[:3].any() and (lse[:3] == -torch.inf).all()
        assert torch.equal(out[3:], expected[0]) and torch.equal(lse[3:], expected[1])
    mine = torch.full((8, HEADS, DIM), 7.0)
    wrapper.run(q, **run, out=mine)
    assert (mine[:3] == 7).all(), "the caller's tensor keeps what it has there"


@pytest.mark.parametrize("kind", ["negative", "grad", "meta", "wrapped", "freed"])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_ragged_runs_refuse_odd_tensors(kind: str, name: str) -> None:
    make, says = ODD[kind]
    wrapper, run = planned("ragged"), ragged_run()
    with pytest.raises(RunError, match=says):
        wrapper.run(**(run | {name: make(run[name])}))


def test_lengths_of_last_pages_may_be_left_out_only_if_tokens_are_known() -> None:
    """Partly filled pages that are read as full ones give wrong results without a word."""
    plan, run, tokens = decode_plan(), decode_run(), ints(19, 16)
    expected = planned().run(**run)
    assert torch.equal(planned(last_page_len=None, seq_lens=tokens).run(**run), expected)
    planned(last_page_len=None, page_size=1)
    pod, both = flashpage.PODWithPagedKVCacheWrapper(workspace()), flashpage.BatchAttention(device="cpu")
    with pytest.raises(PlanError, match="last_page_len=None and seq_lens=None"):
        pod.plan(**(plan | {"last_page_len": None}))
    with pytest.raises(PlanError, match="kv_len_arr=None: pass the tokens of each request"):
        both.plan(ints(0, 1, 2), plan["indptr"], plan["indices"], None, HEADS, KV_HEADS, DIM, DIM, PAGE)
