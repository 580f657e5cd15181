"""vLLM's calls of FlashInfer's wrappers, argument by argument, through `flashinfer`: metadata on the host (pinned if
there is a card), K and V as halves of one cache, padded requests, and attributes that vLLM asserts before a run."""

from __future__ import annotations

import itertools
import math
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engine_batch import LENS, EngineBatch, decode_case, prefill_case
from reference import Options, attention

from flashpage import CapabilityError, RunError, compat

BF16 = torch.bfloat16
FORM = {"cache": "interleaved"}  # [blocks, page, heads, 2 x dim]: K and V are split from it
FORMS = [
    {"kv_layout": "NHD", "page_size": 16},
    {"kv_layout": "HND", "page_size": 32},
    {"kv_layout": "HND", "page_size": 64, "head_dim": 128, "num_q_heads": 8, "num_kv_heads": 1},
    {"kv_layout": "NHD", "page_size": 16, "kv_dtype": "float8_e4m3fn", "scales": "float"},
    {"kv_layout": "HND", "page_size": 16, "soft_cap": 30.0, "window_left": 40, "sm_scale": 0.1},
]


@pytest.fixture(scope="module")
def flashinfer() -> Iterator[types.ModuleType]:
    yield compat.install()
    compat.uninstall()


def on_host(batch: EngineBatch, *tensors: torch.Tensor) -> list[torch.Tensor]:
    return [t.pin_memory() if batch.device != "cpu" else t for t in tensors]


def check_planned(wrapper: Any, batch: EngineBatch, causal: bool | None = None) -> None:
    """vLLM's assertions before every run; a cap of None is planned as 0."""
    case = batch.case
    assert wrapper._window_left == case.window_left
    assert wrapper._logits_soft_cap == (case.soft_cap or 0.0)
    assert wrapper._sm_scale == case.score_scale
    assert causal is None or wrapper._causal == causal


def options_of(batch: EngineBatch) -> dict[str, Any]:
    case = batch.case
    return {
        "sm_scale": case.score_scale,
        "window_left": case.window_left,
        "logits_soft_cap": case.soft_cap or None,
        "q_data_type": BF16,
        "kv_data_type": getattr(torch, case.kv_type),
        "o_data_type": BF16,
    }


def scales_of(batch: EngineBatch) -> dict[str, float]:
    """Scales as numbers, as vLLM keeps them."""
    given = batch.inputs.scales
    return {name: given.get(name, 1.0) for name in ("q_scale", "k_scale", "v_scale")}


# ---------------------------------------------------------------- prefill


def plan_prefill(wrapper: Any, batch: EngineBatch, causal: bool = True, **changed: Any) -> None:
    inputs = batch.inputs
    lengths = on_host(batch, inputs.qo_indptr, inputs.indptr, inputs.last_page_len, batch.seq_lens)
    sizes = dict(zip(("num_qo_heads", "num_kv_heads", "head_dim_qk"), batch.sizes, strict=True))
    values = {"fixed_split_size": -1, "disable_split_kv": False, "causal": causal} | options_of(batch) | changed
    wrapper.plan(
        qo_indptr=lengths[0],
        paged_kv_indptr=lengths[1],
        paged_kv_indices=batch.on_device("indices")[0],
        paged_kv_last_page_len=lengths[2],
        seq_lens=lengths[3],
        page_size=batch.case.page_size,
        **sizes,
        **values,
    )


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_prefill(form: dict[str, Any], device: str, flashinfer: types.ModuleType) -> None:
    batch = EngineBatch(prefill_case(**FORM, **form), device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(batch.workspace(), form["kv_layout"], backend="auto")
    out = torch.full_like(batch.q, math.nan)
    for split in ({}, {"fixed_split_size": 4096}, {"disable_split_kv": True}):
        plan_prefill(wrapper, batch, **split)
        check_planned(wrapper, batch, causal=True)
        wrapper.run(batch.q, batch.kv, out=out, kv_cache_sf=None, **scales_of(batch))
        batch.check(out)
    whole = flashinfer.BatchPrefillWithPagedKVCacheWrapper(batch.workspace(), form["kv_layout"])
    plan_prefill(whole, batch, causal=False)
    batch.check(whole.run(batch.q, batch.kv, **scales_of(batch)), causal=False)


def test_prefill_with_sinks(device: str, flashinfer: types.ModuleType) -> None:
    """Sinks and the whole scale are positional arguments of run; a prefill wrapper."""
    batch = EngineBatch(prefill_case(**FORM, **FORMS[1], sinks=True, window_left=30), device)
    wrapper = flashinfer.BatchAttentionWithAttentionSinkWrapper(
        batch.workspace(),
        "HND",
        backend="auto",
        q_data_type=BF16,
        kv_data_type=BF16,
        head_dim_qk=64,
        head_dim_vo=64,
        window_left=30,
    )
    assert isinstance(wrapper, flashinfer.BatchPrefillWithPagedKVCacheWrapper)
    plan_prefill(wrapper, batch)
    out = torch.empty_like(batch.q)
    sinks = batch.inputs.sinks.to(device)
    wrapper.run(batch.q, batch.kv, sinks, batch.case.score_scale * 1.0 * 1.0, v_scale=1.0, out=out)
    batch.check(out)


# ---------------------------------------------------------------- decode


def plan_decode(wrapper: Any, batch: EngineBatch, plan: Any = None, **changed: Any) -> None:
    """The first call, or fast_decode_plan as called before a replay."""
    inputs = batch.inputs
    indptr, last, seq_lens = on_host(batch, inputs.indptr, inputs.last_page_len, batch.seq_lens)
    common = {"indptr": indptr, "indices": batch.on_device("indices")[0], "last_page_len": last}
    common |= dict(zip(("num_qo_heads", "num_kv_heads", "head_dim"), batch.sizes, strict=True))
    common |= {"page_size": batch.case.page_size, "pos_encoding_mode": "NONE", "rope_scale": None, "rope_theta": None}
    common |= {"non_blocking": True, "fixed_split_size": -1, "disable_split_kv": False}
    common |= {"q_len_per_req": batch.case.q_lens[0], "data_type": None} | options_of(batch) | changed
    if plan is None:
        wrapper.plan(**common, block_tables=None, seq_lens=seq_lens)
    else:
        common.pop("o_data_type")
        plan(wrapper, **common)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("q_len", [1, 3])
def test_decode(q_len: int, form: dict[str, Any], device: str, flashinfer: types.ModuleType) -> None:
    lens = tuple(n + q_len - 1 if n else 0 for n in LENS)
    batch = EngineBatch(decode_case(**FORM, **form, q_len=q_len, kv_lens=lens), device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        batch.workspace(), form["kv_layout"], use_cuda_graph=False, use_tensor_cores=True, backend="auto"
    )
    wrapper.vllm_first_call = True
    plan_decode(wrapper, batch)
    check_planned(wrapper, batch)
    out, lse = torch.full_like(batch.q, math.nan), torch.empty(batch.q.shape[:2], device=device)
    wrapper.run(batch.q, batch.kv, out=out, kv_cache_sf=None, sinks=None, **scales_of(batch))
    batch.check(out)
    found = wrapper.run(batch.q, batch.kv, out=out, lse=lse, return_lse=True, **scales_of(batch))
    batch.check(found)
    assert found[0] is out and found[1] is lse


def test_decode_graph_wrappers(device: str, flashinfer: types.ModuleType) -> None:
    """Padded requests have no pages and last_page_len 0: out is finite, lse is -inf."""
    batches = [EngineBatch(decode_case(**FORM, **FORMS[1], kv_lens=n), device) for n in (LENS, (40, 90, 0, 0, 0))]
    assert batches[1].inputs.last_page_len[2:].tolist() == [0, 0, 0]
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        batches[0].workspace(),
        "HND",
        use_cuda_graph=True,
        paged_kv_indptr_buffer=batches[0].zeros(6),
        paged_kv_indices_buffer=batches[0].zeros(64),
        paged_kv_last_page_len_buffer=batches[0].zeros(5),
        use_tensor_cores=True,
        backend="fa2",
    )
    plan_decode(wrapper, batches[0])
    batches[0].check(wrapper.run(batches[0].q, batches[0].kv, **scales_of(batches[0])))
    plan_decode(wrapper, batches[1], flashinfer.fast_decode_plan)
    check_planned(wrapper, batches[1])
    out, lse = wrapper.run(batches[1].q, batches[1].kv, return_lse=True, **scales_of(batches[1]))
    batches[1].check((out, lse))
    assert bool((out[2:] == 0).all()) and bool((lse[2:] == -math.inf).all())


def test_context_parallel_prefill(device: str, flashinfer: types.ModuleType) -> None:
    """Cached tokens are paged and not causal, new ones ragged and causal; the caller converts LSEs to base e."""
    batch = EngineBatch(prefill_case(**FORM, chunks=((16, 64), (16, 32), (16, 16))), device)
    inputs, sizes = batch.inputs, batch.sizes
    pages = [(tokens - 16) // 16 for tokens in batch.case.kv_lens]  # all but the last page of each request
    tables = torch.full((3, 5), -1, dtype=torch.int32)
    for i, count in enumerate(pages):
        begin = int(inputs.indptr[i])
        tables[i, :count] = inputs.indices[begin : begin + count]
    indptr = torch.tensor([0, *pages]).cumsum(0).int()
    indices = torch.cat([tables[i, :count] for i, count in enumerate(pages)]).to(device)
    last = torch.tensor([16, 16, 0], dtype=torch.int32)
    paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper(batch.workspace(), "NHD")
    paged.plan(
        qo_indptr=inputs.qo_indptr,
        paged_kv_indptr=indptr,
        paged_kv_indices=indices,
        paged_kv_last_page_len=last,
        num_qo_heads=sizes[0],
        num_kv_heads=sizes[1],
        head_dim_qk=sizes[2],
        page_size=16,
        causal=False,
        block_tables=tables.to(device),
        q_data_type=BF16,
        kv_data_type=BF16,
    )
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(batch.workspace(), "NHD")
    ragged.plan(
        qo_indptr=inputs.qo_indptr,
        kv_indptr=inputs.qo_indptr,
        num_qo_heads=sizes[0],
        num_kv_heads=sizes[1],
        head_dim_qk=sizes[2],
        head_dim_vo=sizes[2],
        causal=True,
        sm_scale=batch.case.score_scale,
        window_left=-1,
        logits_soft_cap=None,
        q_data_type=BF16,
    )
    k, v = (torch.cat([t[-16:] for t in rows]).to(device) for rows in (inputs.k, inputs.v))
    states = [paged.run(batch.q, batch.kv, return_lse=True), ragged.run(batch.q, k, v, return_lse=True)]
    outs = torch.stack([out.double() for out, _ in states])
    weights = torch.stack([lse.double() * math.log(2) for _, lse in states]).softmax(0).unsqueeze(-1)
    found = (torch.nan_to_num(outs) * weights).sum(0).cpu()
    options = Options(sm_scale=batch.case.score_scale, causal=True)
    expected = [attention(q, k, v, options).out for q, k, v in zip(inputs.q, inputs.k, inputs.v, strict=True)]
    torch.testing.assert_close(found, torch.cat(expected), rtol=2.0**-6, atol=2.0**-6)


def test_cascade(device: str, flashinfer: types.ModuleType) -> None:
    """vLLM's older calls: two levels, all arguments but the lists and sizes by keyword."""
    batch = EngineBatch(decode_case(**FORM, kv_lens=(70, 40, 129)), device)
    inputs, sizes = batch.inputs, batch.sizes
    shared = torch.randn(48, 2, 2, 64, generator=torch.Generator().manual_seed(5)).to(BF16)
    k, v = batch.kv
    room = [torch.cat([t, t.new_zeros(3, *t.shape[1:])]) for t in (k, v)]
    for memory, rows in zip(room, shared.unbind(1), strict=True):
        memory[-3:] = rows.view(3, 16, 2, 64).to(device)
    qo = [torch.tensor([0, 3], dtype=torch.int32), torch.arange(4, dtype=torch.int32)]
    numbers = [torch.arange(len(k), len(k) + 3, dtype=torch.int32).to(device), batch.on_device("indices")[0]]
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, batch.workspace(), "NHD")
    wrapper.plan(
        qo,
        [torch.tensor([0, 3], dtype=torch.int32), inputs.indptr],
        numbers,
        [torch.tensor([16], dtype=torch.int32), inputs.last_page_len],
        *sizes,
        16,
        causal=True,
        sm_scale=batch.case.score_scale,
        window_left=-1,
        logits_soft_cap=0.0,
        q_data_type=BF16,
        kv_data_type=BF16,
    )
    found = wrapper.run(batch.q, tuple(room)).cpu().double()
    options = Options(sm_scale=batch.case.score_scale)
    for i, (q, own_k, own_v) in enumerate(zip(inputs.q, inputs.k, inputs.v, strict=True)):
        state = attention(q, torch.cat([shared[:, 0], own_k]), torch.cat([shared[:, 1], own_v]), options)
        torch.testing.assert_close(found[i : i + 1], state.out, rtol=2.0**-6, atol=2.0**-6)


def test_seq_lens_and_what_is_refused(flashinfer: types.ModuleType) -> None:
    batch = EngineBatch(decode_case(**FORM), "cpu")
    found = flashinfer.get_seq_lens(batch.inputs.indptr, batch.inputs.last_page_len, 16)
    assert torch.equal(found, batch.seq_lens)
    with pytest.raises(CapabilityError, match="backend='trtllm-gen' is not part of flashpage"):
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(batch.workspace(), "HND", backend="trtllm-gen")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(batch.workspace(), "NHD")
    plan_decode(wrapper, batch)
    with pytest.raises(RunError, match="kv_cache_sf"):
        wrapper.run(batch.q, batch.kv, kv_cache_sf=torch.zeros(1))


def test_decode_with_sinks(device: str, flashinfer: types.ModuleType) -> None:
    """Sinks are a keyword of run, which FlashInfer's own decode kernels ignore."""
    batch = EngineBatch(decode_case(**FORM, **FORMS[0], sinks=True), device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(batch.workspace(), "NHD", use_tensor_cores=True)
    plan_decode(wrapper, batch)
    batch.check(wrapper.run(batch.q, batch.kv, sinks=batch.inputs.sinks.to(device), **scales_of(batch)))


def test_heads_are_gathered(device: str, flashinfer: types.ModuleType) -> None:
    """Decode over a context that is spread over ranks: each rank has all heads' queries, and its own tokens."""
    batch = EngineBatch(decode_case(**FORM, **FORMS[0], kv_lens=(64, 96), num_q_heads=8), device)
    states = []
    for rank in range(2):
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(batch.workspace(), "NHD", use_tensor_cores=True)
        starts = batch.inputs.indptr.tolist()
        mine = [batch.inputs.indices[a:b][rank::2] for a, b in itertools.pairwise(starts)]
        indptr = torch.tensor([0, *map(len, mine)]).cumsum(0).int()
        last = torch.full((2,), 16, dtype=torch.int32)
        wrapper.plan(indptr, torch.cat(mine).to(device), last, *batch.sizes, 16, **options_of(batch))
        states.append(wrapper.run(batch.q, batch.kv, return_lse=True))
    out, lse = flashinfer.merge_states(*(torch.stack(parts, 1) for parts in zip(*states, strict=True)))
    expected = [attention(*rows, Options(sm_scale=batch.case.score_scale))
                for rows in zip(batch.inputs.q, batch.inputs.k, batch.inputs.v, strict=True)]  # fmt: skip
    torch.testing.assert_close(out.cpu().double(), torch.cat([s.out for s in expected]), rtol=2.0**-6, atol=2.0**-6)
    torch.testing.assert_close(lse.cpu().double(), torch.cat([s.lse for s in expected]), rtol=1e-5, atol=1e-4)
