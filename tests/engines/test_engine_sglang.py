"""SGLang's calls of FlashInfer's wrappers, argument by argument (pools of single slots, all tensors on the device), and
those of mini-sglang; both import `flashinfer`.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engine_batch import CHUNKS, LENS, EngineBatch, decode_case, prefill_case, slots
from reference import Options, attention

from flashpage import compat

BF16 = torch.bfloat16
OPTIONS = ({}, {"soft_cap": 12.0, "sm_scale": 0.2}, {"window_left": 11})


@pytest.fixture(scope="module")
def flashinfer() -> Iterator[types.ModuleType]:
    yield compat.install()
    compat.uninstall()


def longer(indices: torch.Tensor) -> torch.Tensor:
    """kv_indices as the engine allocates it, with 256 more entries."""
    return torch.cat([indices, indices.new_full((256,), 2**30)])


def run_values(batch: EngineBatch, *, causal: bool | None = None) -> dict[str, Any]:
    case = batch.case
    values: dict[str, Any] = {"sm_scale": case.score_scale, "logits_soft_cap": case.soft_cap}
    values |= {"k_scale": 1.0, "v_scale": 1.0}
    return values if causal is None else values | {"causal": causal, "window_left": case.window_left}


# ---------------------------------------------------------------- decode


def begin_decode(wrapper: Any, batch: EngineBatch, **options: Any) -> None:
    """Indptr and page numbers on the device; seven positional arguments, the page size, and keywords."""
    indptr, indices, last_page_len = batch.on_device("indptr", "indices", "last_page_len")
    common = {"data_type": BF16, "q_data_type": BF16, "non_blocking": True}
    common |= {"fixed_split_size": None, "disable_split_kv": False}
    pages = (indptr, longer(indices), last_page_len[: len(batch.case.kv_lens)])
    wrapper.begin_forward(*pages, *batch.sizes, 1, **(common | options))


@pytest.mark.parametrize("use_tensor_cores", [False, True])
@pytest.mark.parametrize("split", [{}, {"fixed_split_size": 2048}, {"disable_split_kv": True}], ids=str)
@pytest.mark.parametrize("options", OPTIONS[:2], ids=str)
def test_decode(
    options: dict[str, Any], split: dict[str, Any], use_tensor_cores: bool, device: str, flashinfer: types.ModuleType
) -> None:
    batch = EngineBatch(decode_case(**slots(**options)), device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        batch.workspace(), "NHD", backend="fa2", use_tensor_cores=use_tensor_cores
    )
    begin_decode(wrapper, batch, **split)
    batch.check(wrapper.forward(batch.q, batch.kv, **run_values(batch)))


def test_decode_of_a_window_by_trimmed_indices(device: str, flashinfer: types.ModuleType) -> None:
    """The engine leaves out page numbers that the window hides."""
    lens = tuple(min(n, 12) for n in LENS)
    batch = EngineBatch(decode_case(**slots(kv_lens=lens)), device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(batch.workspace(), "NHD", backend="fa2")
    begin_decode(wrapper, batch)
    batch.check(wrapper.forward(batch.q, batch.kv, **run_values(batch)))


def test_decode_graph_wrappers(device: str, flashinfer: types.ModuleType) -> None:
    """One wrapper for each captured batch size, on slices of shared buffers; after the capture begin_forward is
    fast_decode_plan, which also gets the indptr on the host."""
    batches = [EngineBatch(decode_case(**slots(kv_lens=lens)), device) for lens in (LENS, (3, 400, 0, 8, 8), LENS)]
    most = max(len(b.inputs.indices) for b in batches) + 256
    kv_indptr, indices, last = (batches[0].zeros(n) for n in (65, most, 64))
    last.fill_(1)
    size = len(LENS)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        batches[0].workspace(),
        "NHD",
        backend="fa2",
        use_cuda_graph=True,
        use_tensor_cores=True,
        paged_kv_indptr_buffer=kv_indptr[: size + 1],
        paged_kv_indices_buffer=indices,
        paged_kv_last_page_len_buffer=last[:size],
    )
    assert wrapper.is_cuda_graph_enabled
    begin_decode(wrapper, batches[0])
    batches[0].check(wrapper.forward(batches[0].q, batches[0].kv, **run_values(batches[0])))
    wrapper.begin_forward = functools.partial(flashinfer.fast_decode_plan, wrapper)
    assert wrapper.begin_forward.func == flashinfer.fast_decode_plan
    for batch in batches[1:]:
        begin_decode(wrapper, batch, global_override_indptr_cpu=batch.inputs.indptr)
        batch.check(wrapper.forward(batch.q, batch.kv, **run_values(batch)))


# ---------------------------------------------------------------- extend


def begin_paged(wrapper: Any, batch: EngineBatch, **options: Any) -> None:
    """Plans without causal and soft cap: forward gets them."""
    qo_indptr, indptr, indices, last = batch.on_device("qo_indptr", "indptr", "indices", "last_page_len")
    common = {"q_data_type": BF16, "kv_data_type": BF16, "custom_mask": None, "non_blocking": True}
    common |= {"fixed_split_size": None, "prefix_len_ptr": None, "token_pos_in_items_ptr": None}
    common |= {"token_pos_in_items_len": 0, "max_item_len_ptr": None}
    wrapper.begin_forward(qo_indptr, indptr, longer(indices), last, *batch.sizes, 1, **(common | options))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("planned", [{}, {"window_left": 11}, {"fixed_split_size": 4096}], ids=str)
def test_paged_extend(
    options: dict[str, Any], planned: dict[str, Any], device: str, flashinfer: types.ModuleType
) -> None:
    batch = EngineBatch(prefill_case(**slots(**options)), device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(batch.workspace(), "NHD", backend="fa2")
    begin_paged(wrapper, batch, **planned)
    split = {"fixed_split_size": planned.get("fixed_split_size", 0)}
    batch.check(wrapper.forward(batch.q, batch.kv, **run_values(batch, causal=True)), **split)
    found = wrapper.forward_return_lse(batch.q, batch.kv, **run_values(batch, causal=False))
    batch.check(found, causal=False, **split)


@pytest.mark.parametrize("kind", [torch.bool, torch.uint8], ids=str)
def test_verify_with_a_tree_mask(kind: torch.dtype, device: str, flashinfer: types.ModuleType) -> None:
    """Flat masks on the device, also in graph mode; the engine reads the wrapper's mask buffer."""
    batch = EngineBatch(prefill_case(**slots(mask="dense", chunks=((4, 30), (4, 5), (4, 4), (4, 100)))), device)
    mask = torch.cat([m.flatten() for m in batch.inputs.masks]).to(device).to(kind)
    eager = flashinfer.BatchPrefillWithPagedKVCacheWrapper(batch.workspace(), "NHD", backend="fa2")
    begin_paged(eager, batch, custom_mask=mask)
    expected = eager.forward(batch.q, batch.kv, **run_values(batch, causal=True))
    batch.check(expected)
    graph = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        batch.workspace(),
        "NHD",
        backend="fa2",
        use_cuda_graph=True,
        qo_indptr_buf=batch.zeros(5),
        paged_kv_indptr_buf=batch.zeros(5),
        paged_kv_indices_buf=batch.zeros(1024),
        paged_kv_last_page_len_buf=batch.zeros(4),
        custom_mask_buf=batch.zeros(4096).to(torch.uint8),
        mask_indptr_buf=batch.zeros(5),
    )
    assert graph._custom_mask_buf is not None and len(graph._paged_kv_indices_buf) == 1024
    begin_paged(graph, batch, custom_mask=mask)
    assert torch.equal(graph.forward(batch.q, batch.kv, **run_values(batch, causal=True)), expected)


@pytest.mark.parametrize("options", OPTIONS[:2], ids=str)
def test_ragged_extend_over_a_cached_prefix(options: dict[str, Any], device: str, flashinfer: types.ModuleType) -> None:
    """New tokens are ragged and causal, the prefix is paged and not causal; without a prefix nothing is merged."""
    from flashinfer.cascade import merge_state

    batch = EngineBatch(prefill_case(**slots(**options)), device)
    new = [rows for rows, _ in CHUNKS]
    prefixes = [tokens - rows for rows, tokens in CHUNKS]
    qo_indptr, indptr, indices = batch.on_device("qo_indptr", "indptr", "indices")
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(batch.workspace(), "NHD", backend="auto")
    ragged.begin_forward(qo_indptr, qo_indptr, *batch.sizes, q_data_type=BF16)
    k, v = (torch.cat([t[len(t) - n :] for t, n in zip(rows, new, strict=True)]).to(device)
            for rows in (batch.inputs.k, batch.inputs.v))  # fmt: skip
    values = {"sm_scale": batch.case.score_scale, "logits_soft_cap": batch.case.soft_cap}
    first = ragged.forward_return_lse(batch.q, k, v, causal=True, window_left=-1, **values)
    assert torch.equal(ragged.forward(batch.q, k, v, causal=True, **values), first[0])

    paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper(batch.workspace(), "NHD", backend="fa2")
    pages = torch.cat([indices[int(indptr[i]) : int(indptr[i]) + n] for i, n in enumerate(prefixes)])
    prefix_indptr = torch.tensor([0, *prefixes]).cumsum(0).int().to(device)
    last = torch.ones(len(prefixes), dtype=torch.int32, device=device)
    types_of = {"q_data_type": BF16, "kv_data_type": BF16}
    paged.begin_forward(qo_indptr, prefix_indptr, longer(pages), last, *batch.sizes, 1, **types_of)
    second = paged.forward_return_lse(
        batch.q, batch.kv, causal=False, window_left=-1, k_scale=1.0, v_scale=1.0, **values
    )
    out, lse = merge_state(*first, *second)
    flat = [
        attention(q, k, v, Options(sm_scale=batch.case.score_scale, soft_cap=batch.case.soft_cap, causal=True))
        for q, k, v in zip(batch.inputs.q, batch.inputs.k, batch.inputs.v, strict=True)
    ]
    torch.testing.assert_close(out.cpu().double(), torch.cat([s.out for s in flat]), rtol=2.0**-6, atol=2.0**-6)
    torch.testing.assert_close(lse.cpu().double(), torch.cat([s.lse for s in flat]), rtol=1e-5, atol=1e-4)


def test_ragged_chunks_of_expanded_mla(device: str, flashinfer: types.ModuleType) -> None:
    """Keys of 192 and values of 128 by keyword, chunk by chunk; forward gets causal."""
    case = prefill_case(entry="ragged", head_dim=192, head_dim_vo=128, num_q_heads=4, num_kv_heads=4, cache="tuple")
    batch = EngineBatch(case, device)
    k, v = (half[0] for half in batch.inputs.cache.argument(device))
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(batch.workspace(), "NHD", backend="auto")
    qo_indptr, kv_indptr = batch.on_device("qo_indptr", "indptr")
    wrapper.begin_forward(
        qo_indptr=qo_indptr,
        kv_indptr=kv_indptr,
        num_qo_heads=4,
        num_kv_heads=4,
        head_dim_qk=192,
        head_dim_vo=128,
        q_data_type=BF16,
        causal=False,
    )
    values = {"sm_scale": case.score_scale, "logits_soft_cap": 0.0}
    found = wrapper.forward_return_lse(batch.q, k, v, causal=True, **values)
    batch.check(found)
    assert torch.equal(wrapper.forward(batch.q, k, v, causal=True, **values), found[0])
    batch.check(wrapper.forward(batch.q, k, v, causal=False, **values), causal=False)


def test_ragged_block_masks(device: str, flashinfer: types.ModuleType) -> None:
    """A diffusion model's mask: rows see their own block and all earlier ones."""
    case = prefill_case(entry="ragged", chunks=((64, 64), (32, 96)), mask="dense", cache="tuple")
    batch = EngineBatch(case, device)
    masks = []
    for rows, tokens in zip(case.q_lens, case.kv_lens, strict=True):
        own = (torch.arange(rows) + tokens - rows) // 32
        masks.append(own.unsqueeze(1) >= torch.arange(tokens) // 32)
    batch.inputs = dataclasses.replace(batch.inputs, masks=masks)
    k, v = (half[0] for half in batch.inputs.cache.argument(device))
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(batch.workspace(), "NHD", backend="fa2")
    mask = torch.cat([m.flatten() for m in masks]).to(device)
    wrapper.begin_forward(*batch.on_device("qo_indptr", "indptr"), *batch.sizes, q_data_type=BF16, custom_mask=mask)
    batch.check(wrapper.forward(batch.q, k, v, causal=True, sm_scale=case.score_scale))


# ---------------------------------------------------------------- mini-sglang


def test_mini_sglang(device: str, flashinfer: types.ModuleType) -> None:
    """Wrappers that share workspaces, backends written as attributes, every argument by keyword."""
    decode = EngineBatch(decode_case(**slots()), device)
    prefill = EngineBatch(prefill_case(**slots()), device)
    workspace = decode.workspace()
    first = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, kv_layout="NHD", backend="fa2")
    second = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace, use_tensor_cores=True, kv_layout="NHD", backend="fa2"
    )
    third = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(
        workspace,
        kv_layout="NHD",
        use_tensor_cores=True,
        indptr_buffer=decode.zeros(6),
        indices_buffer=decode.zeros(1024),
        last_page_len_buffer=decode.zeros(5),
    )
    second._int_workspace_buffer = first._int_workspace_buffer
    third._int_workspace_buffer = first._int_workspace_buffer
    third._backend = "fa2"
    sizes = dict(zip(("num_qo_heads", "num_kv_heads", "head_dim"), decode.sizes, strict=True))
    for wrapper in (second, third):
        indices = decode.on_device("indices")[0]
        pages = {"indptr": decode.inputs.indptr, "indices": indices, "last_page_len": decode.inputs.last_page_len}
        wrapper.plan(
            **pages,
            **sizes,
            page_size=1,
            pos_encoding_mode="NONE",
            seq_lens=decode.seq_lens,
            data_type=BF16,
            q_data_type=BF16,
            kv_data_type=BF16,
            non_blocking=True,
        )
        decode.check(wrapper.run(q=decode.q, paged_kv_cache=decode.kv))
    first.plan(
        qo_indptr=prefill.inputs.qo_indptr,
        paged_kv_indptr=prefill.inputs.indptr,
        paged_kv_indices=prefill.on_device("indices")[0],
        paged_kv_last_page_len=prefill.inputs.last_page_len,
        num_qo_heads=sizes["num_qo_heads"],
        num_kv_heads=sizes["num_kv_heads"],
        head_dim_qk=sizes["head_dim"],
        page_size=1,
        pos_encoding_mode="NONE",
        seq_lens=prefill.seq_lens,
        q_data_type=BF16,
        kv_data_type=BF16,
        non_blocking=True,
        causal=True,
    )
    prefill.check(first.run(q=prefill.q, paged_kv_cache=prefill.kv))
