"""Arguments that once ended the process, or gave a wrong result without a word: tensors of odd memory, values of odd
types. tests/support/bad_input.py has the table of plainly wrong ones."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from bad_input import DIM, HEADS, KINDS, KV_HEADS, PAGE, PAGES, decode_plan, decode_run, ints, ragged_run, workspace

import flashpage
from flashpage import CapabilityError, PlanError, RunError, native
from flashpage.base import tensor_memory


def planned(kind: str = "decode", **changed: Any) -> Any:
    name, plan_arguments, _ = KINDS[kind]
    wrapper = getattr(flashpage, name)(workspace())
    wrapper.plan(**(plan_arguments() | changed))
    return wrapper


def freed(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose storage went, a part of which some view still is."""
    whole = torch.cat([tensor.flatten()[:4], tensor.flatten()])
    view = whole[4:].view(tensor.shape)
    whole.untyped_storage().resize_(0)
    return view


class Wrapped(torch.Tensor):
    """A subclass without memory of its own, as DTensor is one."""

    @staticmethod
    def __new__(cls, tensor: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, tensor.shape, strides=tensor.stride(), dtype=tensor.dtype)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(function)


ODD: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "freed": (freed, "storage was resized to 0"),
    "negative": (torch._neg_view, r"resolve_neg\(\)"),
    "imaginary": (lambda t: torch.complex(t, t).conj().imag[...], r"strides|resolve_neg\(\)"),
    "grad": (lambda t: t.clone().requires_grad_(), "no_grad"),
    "parameter": (lambda t: torch.nn.Parameter(t.clone()), "no_grad"),
    "sparse": (lambda t: t.to_sparse(), r"to_dense\(\)"),
    "meta": (lambda t: t.to("meta"), "on meta"),
    "wrapped": (Wrapped, "Wrapped, which has no memory"),
    "functional": (torch._to_functional_tensor, "no memory of its own|requires grad"),
    "list": (lambda t: t.tolist(), "(list|tuple) of"),
}


def parts_of(run: dict[str, Any], argument: str, make: Callable[[torch.Tensor], Any]) -> dict[str, Any]:
    """The arguments of a run with one of them made odd; the cache as a pair, of which V is."""
    if argument == "v" and "paged_kv_cache" in run:
        k, v = run["paged_kv_cache"].unbind(1)
        return run | {"paged_kv_cache": (k.contiguous(), make(v.contiguous()))}
    return run | {argument: make(run[argument])}


@pytest.mark.parametrize("is_second", [False, True])
@pytest.mark.parametrize("argument", ["q", "paged_kv_cache", "v", "out", "lse"])
@pytest.mark.parametrize("kind", ODD)
def test_a_run_refuses_odd_tensors(kind: str, argument: str, is_second: bool) -> None:
    """At the first run, and at one that would be a single call of a builtin."""
    make, says = ODD[kind]
    run = decode_run() | {"out": torch.empty(2, HEADS, DIM), "lse": torch.empty(2, HEADS)}
    wrapper = planned()
    if is_second:
        wrapper.run(**parts_of(run, argument, lambda t: t))
    with pytest.raises(RunError, match=says) as caught:
        wrapper.run(**parts_of(run, argument, make))
    assert len(str(caught.value)) < 400
    assert wrapper.run(**decode_run()).isfinite().all()


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
    """An AsyncCollectiveTensor is what parallel engines hold: it is waited for."""

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
        wrapper.run(q, cache, out=out, lse=torch.empty(2, HEADS))  # the second round: by the builtin
    # Views of one tensor that share nothing.
    packed = torch.zeros(2, 2, HEADS, DIM)
    rows_of(packed, 0).copy_(q)
    for _ in range(2):
        wrapper.run(rows_of(packed, 0), cache, out=rows_of(packed, 1))
        assert torch.equal(rows_of(packed, 1), out) and torch.equal(rows_of(packed, 0), q)


def test_overlap_is_found_exactly() -> None:
    """Against a search of all elements."""
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
    """autograd refuses to use a tensor that was written after it was saved."""
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
    wrapper.plan(**decode_plan())  # a second one is taken by one foreign call
    again = decode_plan()
    wrapper.plan(**again)
    again["indices"].fill_(2**30)
    assert torch.equal(wrapper.run(**run), expected)


def test_masks_may_change_after_plan() -> None:
    name, plan_arguments, run_arguments = KINDS["prefill"]
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
    name, plan_arguments, run_arguments = KINDS[kind]
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


# ---------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        *(("sm_scale", value) for value in (1e39, float("inf"), float("nan"), 1e-50, "1", torch.ones(1), None)),
        *(("logits_soft_cap", value) for value in (1e39, 1e-45, "30", torch.ones(2))),
        *(("rope_scale", value) for value in (1e39, 0, -1.0, 1e-46)),
        *(("rope_theta", value) for value in (1e300, 0, float("inf"))),
        *(("causal", value) for value in ("False", torch.tensor(True), 2, [], 0.5)),
        *(("disable_split_kv", value) for value in ("no", torch.tensor(True))),
        *(("non_blocking", value) for value in ("False", torch.tensor(False), 3)),
        *(("window_left", value) for value in (1.5, "3", torch.tensor([3, 4]), True, 2**40)),
        *(("num_qo_heads", value) for value in (True, torch.tensor(8), 2**31)),
        *(("kv_data_type", value) for value in ([torch.float32], list(range(100000)))),
        *(("pos_encoding_mode", value) for value in (["NONE"], b"NONE")),
    ],
)
def test_a_plan_refuses_odd_values(argument: str, value: Any) -> None:
    if value is None:
        assert planned("prefill", **{argument: value}) is not None
        return
    wrapper = planned("prefill")
    for _ in range(2):  # also right after a plan with other arguments
        with pytest.raises(PlanError, match=argument) as caught:
            wrapper.plan(**(KINDS["prefill"][1]() | {argument: value}))
        assert len(str(caught.value)) < 300
    wrapper.plan(**KINDS["prefill"][1]())


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        *(("return_lse", value) for value in ("False", torch.tensor(False), 2, None)),
        *(("window_left", value) for value in (1.5, "3", torch.tensor([3, 4]), True)),
        *(("enable_pdl", value) for value in ("no", torch.tensor(True))),
        *(("k_scale", value) for value in (float("nan"), 1e39, "1", torch.tensor(float("inf")), 1e-46)),
        ("v_scale", torch._neg_view(torch.ones(KV_HEADS))),
        ("q_scale", torch.ones(HEADS, requires_grad=True)),
        ("sinks", torch._neg_view(torch.ones(HEADS))),
        ("sinks", torch.ones(HEADS).to("meta")),
    ],
)
def test_a_run_refuses_odd_values(argument: str, value: Any) -> None:
    wrapper = planned()
    for _ in range(2):
        with pytest.raises((RunError, PlanError), match=argument):
            wrapper.run(**decode_run(), **{argument: value})
        wrapper.run(**decode_run())


def test_products_of_scales_fit_fp32() -> None:
    with pytest.raises(RunError, match=r"sm_scale \* q_scale \* k_scale"):
        planned(sm_scale=1e20).run(**decode_run(), q_scale=1e20, k_scale=1.0)


@pytest.mark.parametrize("value", [True, False, 1, 0, np.True_, np.False_])
def test_flags_of_all_kinds(value: Any) -> None:
    wrapper = planned("prefill", causal=value, disable_split_kv=value, non_blocking=value)
    assert wrapper._planner.options.causal is bool(value)
    assert isinstance(wrapper.run(**KINDS["prefill"][2](), return_lse=value), tuple) is bool(value)


def test_a_window_that_no_context_fills_is_none() -> None:
    wrapper, run = planned(), decode_run()
    expected = wrapper.run(**run)
    for window in (2**30, 2**31 - 1, -1, -5):
        assert torch.equal(wrapper.run(**run, window_left=window), expected)
    assert len(wrapper._planner.active) == 1


def test_messages_are_short() -> None:
    numbers = list(range(200_000))
    for name, arguments in (
        ("plan", decode_plan() | {"indptr": numbers}),
        ("plan", decode_plan() | {"indices": numbers}),
    ):
        with pytest.raises(PlanError, match="list of 200000 entries") as caught:
            getattr(planned(), name)(**arguments)
        assert len(str(caught.value)) < 200
    with pytest.raises(RunError, match="list of 200000 entries") as caught:
        planned().run(numbers, decode_run()["paged_kv_cache"])
    assert len(str(caught.value)) < 200


def test_fixed_split_sizes_beyond_any_context_never_cut() -> None:
    sizes = (2**26, 2**27, 2**28, 2**28 + 1, 2**31 - 1)
    pieces = {planned(fixed_split_size=size)._planner.options.fixed_piece_tokens for size in sizes}
    assert pieces == {-1}


@pytest.mark.parametrize(("field", "value"), [("page_size", 2**31), ("batch", -(2**31) - 1), ("page_size", 2**32)])
def test_fields_of_32_bits_refuse_more(field: str, value: int) -> None:
    struct = native.Tables()
    setattr(struct, field, 2**31 - 1)
    with pytest.raises(AssertionError, match=f"Tables.{field}={value} does not fit"):
        setattr(struct, field, value)
    assert getattr(struct, field) == 2**31 - 1
    with pytest.raises(AssertionError):
        native.Tables(**{field: value})
    with pytest.raises((AssertionError, TypeError, Exception)):
        native.load().fp_cpu_set_threads(2**32)


# ---------------------------------------------------------------- functions


def append_arguments(**changed: Any) -> dict[str, Any]:
    arguments = {
        "append_key": torch.randn(3, KV_HEADS, DIM),
        "append_value": torch.randn(3, KV_HEADS, DIM),
        "batch_indices": ints(0, 0, 1),
        "positions": ints(0, 1, 2),
        "paged_kv_cache": torch.zeros(PAGES, 2, PAGE, KV_HEADS, DIM),
        "kv_indices": ints(0, 1, 2),
        "kv_indptr": ints(0, 1, 2),
        "kv_last_page_len": ints(2, 3),
    }
    return arguments | changed


@pytest.mark.parametrize("name", ["batch_indices", "positions", "kv_indices", "kv_indptr"])
@pytest.mark.parametrize("beyond", [2**32, -(2**32), 2**31, 2**63 - 1])
def test_append_does_not_cut_numbers_off(name: str, beyond: int) -> None:
    arguments = append_arguments()
    numbers = arguments[name].long()
    numbers[0] = beyond
    with pytest.raises(RunError, match=rf"{name}\[0\]={beyond}"):
        flashpage.append_paged_kv_cache(**(arguments | {name: numbers}))
    assert not arguments["paged_kv_cache"].any()


@pytest.mark.parametrize("name", ["append_key", "append_value", "paged_kv_cache"])
@pytest.mark.parametrize("kind", ["freed", "negative", "grad", "sparse", "meta", "wrapped", "list"])
def test_append_refuses_odd_tensors(kind: str, name: str) -> None:
    arguments = append_arguments()
    make, says = ODD[kind]
    with pytest.raises(RunError, match=says):
        flashpage.append_paged_kv_cache(**(arguments | {name: make(arguments[name])}))


def test_append_counts_its_writes_and_refuses_shared_memory() -> None:
    arguments = append_arguments()
    before = arguments["paged_kv_cache"]._version
    flashpage.append_paged_kv_cache(**arguments)
    assert arguments["paged_kv_cache"]._version > before and arguments["paged_kv_cache"][0].any()
    shared = torch.zeros(2, PAGE, KV_HEADS, DIM).expand(PAGES, 2, PAGE, KV_HEADS, DIM)
    with pytest.raises(RunError, match="paged_kv_cache has strides"):
        flashpage.append_paged_kv_cache(**append_arguments(paged_kv_cache=shared))


def test_indptr_of_appends_never_falls() -> None:
    with pytest.raises(RunError, match=r"append_indptr\[2\]=3 is smaller"):
        flashpage.get_batch_indices_positions(ints(0, 5, 3), ints(5, 5), 5)
    for nnz in (2.5, -1, "3", True):
        with pytest.raises(RunError, match="nnz"):
            flashpage.get_batch_indices_positions(ints(0, 5), ints(5), nnz)


@pytest.mark.parametrize("argument", range(4))
@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("name", ["merge_state", "merge_state_in_place"])
def test_merges_refuse_odd_tensors(name: str, kind: str, argument: int) -> None:
    arguments: list[Any] = [torch.randn(2, HEADS, DIM), torch.randn(2, HEADS)] * 2
    make, says = ODD[kind]
    arguments = [t.clone() for t in arguments]
    arguments[argument] = make(arguments[argument])
    with pytest.raises(RunError, match=says if kind != "imaginary" else "strides|resolve_neg|contiguous"):
        getattr(flashpage, name)(*arguments)


def test_packing_and_merging_read_values_not_memory() -> None:
    """Functions of torch's own operations resolve lazy values by themselves."""
    bits = torch.randint(0, 2, (20,), dtype=torch.uint8)
    assert torch.equal(flashpage.packbits(torch._neg_view(-bits)), flashpage.packbits(bits))


@pytest.mark.parametrize("kind", ["negative", "grad", "meta", "wrapped", "freed"])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_ragged_runs_refuse_odd_tensors(kind: str, name: str) -> None:
    make, says = ODD[kind]
    wrapper, run = planned("ragged"), ragged_run()
    with pytest.raises(RunError, match=says):
        wrapper.run(**(run | {name: make(run[name])}))


def test_views_between_a_card_s_loads_are_copied() -> None:
    """The merge kernel loads four elements at once (on a card: tests/card/test_card_ops.py)."""
    from flashpage.wrappers.operators import vector_rows

    whole = torch.arange(8 * 4 * 130, dtype=torch.float16).view(8, 4, 130)
    aligned, inside = torch.zeros(8, 4, 128).half(), whole[..., 1:129]
    assert vector_rows(aligned) is aligned and vector_rows(whole[..., 4:].contiguous()) is not None
    for view in (inside, whole[..., :128], whole.view(-1)[1:513].view(2, 2, 128)):
        found = vector_rows(view)
        assert found is not view and torch.equal(found, view) and found.data_ptr() % 8 == 0 and found.is_contiguous()
