"""Runs cases over latent rows (MLA) through their wrappers, to which a batch is given in one of FlashInfer's forms."""

from __future__ import annotations

from typing import Any

import latent_rows
import torch
from caches import Cache
from cases.case import Case
from inputs import Inputs

import flashpage

# How a plan gets the batch; on_device: as a table of pages, planned by the device, which on the CPU is the same code.
FORMS = ("csr", "dense", "dual", "on_device")


def plan_options(case: Case) -> dict[str, Any]:
    """The options that the plans of both wrappers take."""
    return {
        "num_heads": case.num_q_heads,
        "head_dim_ckv": case.value_dim,
        "head_dim_kpe": case.head_dim - case.value_dim,
        "page_size": case.page_size,
        "sm_scale": case.score_scale,
        "q_data_type": getattr(torch, case.q_dtype),
        "kv_data_type": None if case.packed_format else getattr(torch, case.kv_type),
        "kv_row_format": case.packed_format or None,
        "output_dtype": case.o_dtype or None,
        "fixed_split_size": case.fixed_split_size or None,
        "disable_split_kv": case.disable_split_kv,
    }


def tables(inputs: Inputs) -> torch.Tensor:
    """The page numbers as [batch, most pages]; entries without a page are no number of one."""
    counts = inputs.indptr.diff().tolist()
    found = torch.full((len(counts), max([*counts, 1])), 2**30, dtype=torch.int32)
    for row, begin, count in zip(found, inputs.indptr.tolist(), counts, strict=False):
        row[:count] = inputs.indices[begin : begin + count]
    return found


def plan_pages(wrapper: Any, inputs: Inputs, form: str, device: str, **more: Any) -> None:
    """Plans the case; `more`: a mask."""
    case, metadata = inputs.case, flashpage.MLAPlanMetadata
    lens, rows = torch.tensor(case.kv_lens, dtype=torch.int32), max(case.q_lens, default=0)
    csr = (inputs.qo_indptr, inputs.indptr, inputs.indices.to(device), lens)
    dense = {"cum_seq_lens_q": inputs.qo_indptr, "block_tables": tables(inputs), "seq_lens": lens}
    options = plan_options(case) | {"causal": case.causal, **more}
    options |= {} if case.lse_mode == "base2" else {"lse_mode": case.lse_mode}
    given = {
        "csr": lambda: metadata.csr(*csr),
        "dense": lambda: metadata.dense(**dense),
        "dual": lambda: metadata.dual(*csr, **dense),
    }
    if form != "on_device":
        wrapper.plan(metadata=given[form](), **options)
        return
    table = metadata.dense(**{name: tensor.to(device) for name, tensor in dense.items()}, max_q_len=max(1, rows))
    if device == "cpu":
        wrapper.plan(metadata=given["csr"](), **options)
        wrapper._plan_tables(table)
    else:
        wrapper.plan(metadata=table, **options)


def cache_arguments(case: Case, cache: Cache, device: str) -> dict[str, Any]:
    """The cache and its scales, as a run takes them."""
    halves = [half.squeeze(2) for half in cache.argument(device)]
    if case.packed_format:
        return {"kv_cache": halves[0]}
    return {"ckv_cache": halves[0], "kpe_cache": halves[1], **latent_rows.run_arguments(case, cache, device)}


def query_arguments(case: Case, q: torch.Tensor) -> dict[str, Any]:
    """The queries, as a run takes them."""
    parts = [q[..., : case.value_dim], q[..., case.value_dim :]]
    if case.packed_format:
        return {"query": q}
    if case.q_strides == "split":
        parts = [part.contiguous() for part in parts]
    return {"q_nope": parts[0], "q_pe": parts[1]}


def planned_run(inputs: Inputs, form: str, device: str, workspace: torch.Tensor, masks: dict[str, Any]) -> Any:
    """The run of a wrapper that has planned the case."""
    case = inputs.case
    if not case.selected:
        wrapper = flashpage.BatchMLAPagedAttentionWrapper(workspace)
        wrapper._int_workspace_buffer.fill_(255)
        plan_pages(wrapper, inputs, form, device, **masks)
        return wrapper.run
    assert inputs.masks is not None
    sparse = flashpage.BatchMLASparseAttentionWrapper(workspace)
    indices, lengths = latent_rows.lists(case, inputs.indptr, inputs.indices, inputs.masks)
    if form == "on_device" and lengths is not None:
        lengths = lengths.to(device)
    options, second = plan_options(case), {}
    if case.second_page:
        two = latent_rows.two_lists(case, indices, lengths, inputs.cache.argument("cpu")[0].squeeze(2))
        indices, lengths, second = two.first, two.first_lengths, {"extra_kv_cache": two.cache.to(device)}
        options |= {"extra_indices": two.second.to(device), "extra_topk_length": two.second_lengths}
    sparse.plan(indices.to(device), lengths, **options)
    return lambda **given: sparse.run(**given, **second, lse_mode=case.lse_mode)
