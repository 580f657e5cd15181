"""Plans for kernels on the host, with units and cuts that a test chooses."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import itertools
import math
from typing import Any

import latent_rows
import numpy as np
import torch
from cases.case import Case
from inputs import Inputs
from native_build import shared_library

from flashpage import native
from flashpage.native import records

_MERGE_ROWS = 64  # of an item


@dataclasses.dataclass
class Planned:
    """A plan's bytes and its partial results: each CTA has its own items, of which those of a cut unit are pieces."""

    data: np.ndarray
    num_ctas: int
    partial_out: torch.Tensor
    partial_lse: torch.Tensor


def listed(case: Case, inputs: Inputs) -> tuple[Case, Inputs]:
    """A selected case as its plan sees it: each row is a request, and its list the pages."""
    assert inputs.masks is not None
    indices, lengths = latent_rows.lists(case, inputs.indptr, inputs.indices, inputs.masks)
    rows, topk = indices.shape
    lens = (topk,) * rows if lengths is None else tuple(lengths.tolist())
    starts = torch.arange(rows + 1)
    if case.second_page:
        two = latent_rows.two_lists(case, indices, lengths, inputs.cache.argument("cpu")[0].squeeze(2))
        indices, lens = two.first, two.lens()
    case = dataclasses.replace(case, q_lens=(1,) * rows, kv_lens=lens)
    return case, dataclasses.replace(inputs, qo_indptr=starts, indptr=starts * topk, indices=indices)


def plan_of(case: Case, inputs: Inputs, tile_q: int, cut: int = 0) -> Planned:
    """All requests in one CTA; with `cut`, each unit is cut there, and the second pieces belong to a second CTA."""
    items: list[list[np.ndarray]] = [[], []]
    merges, partial, group = [], 0, case.num_q_heads // case.num_kv_heads
    for request, (rows, tokens) in enumerate(zip(case.q_lens, case.kv_lens, strict=True)):
        if not rows:
            continue
        item = np.zeros(1, records.WORK_ITEM)
        item["kv_offset"], item["request"] = int(inputs.indptr[request]), request
        item["q_begin"], item["q_len"], item["kv_len"] = int(inputs.qo_indptr[request]), rows, tokens
        item["kv_end"] = tokens
        units = -(-rows * group // tile_q)
        item["num_units"] = units * case.num_kv_heads
        item["partial_row"] = item["merge"] = -1
        if not cut or tokens <= cut:
            items[0].append(item)
            continue
        for head, unit in itertools.product(range(case.num_kv_heads), range(units)):
            first = unit * tile_q
            own = min(tile_q, rows * group - first)
            for piece, (begin, end) in enumerate(((0, cut), (cut, tokens))):
                one = item.copy()
                one["kv_head"] = head
                one["first_packed_row"], one["num_units"], one["kv_begin"], one["kv_end"] = first, 1, begin, end
                one["partial_row"], one["piece"], one["merge"] = partial + piece * own, piece, len(merges)
                items[piece].append(one)
            for row in range(0, own, _MERGE_ROWS):
                merge = np.zeros(1, records.MERGE_ITEM)
                merge["kv_head"] = head
                merge["request"], merge["q_begin"], merge["first_packed_row"] = request, item["q_begin"], first + row
                merge["num_rows"], merge["partial_row"] = min(_MERGE_ROWS, own - row), partial + row
                merge["partial_stride"], merge["num_partials"] = own, 2
                merges.append(merge)
            partial += 2 * own
    num_ctas = 2 if cut else 1
    header, starts = np.zeros(1, records.PLAN_HEADER), np.zeros(num_ctas, records.CTA_START)
    everything = [item for of_cta in items for item in of_cta]
    header["num_ctas"], header["num_items"], header["num_merges"] = num_ctas, len(everything), len(merges)
    header["merge_rows"] = _MERGE_ROWS
    header["items_offset"] = header.nbytes + starts.nbytes
    header["merges_offset"] = header["items_offset"] + len(everything) * records.WORK_ITEM.itemsize
    ends = np.cumsum([len(of_cta) for of_cta in items])[:num_ctas]
    for cta, end in enumerate(ends):
        starts[cta]["items"]["begin"], starts[cta]["items"]["end"] = end - len(items[cta]), end
        if items[cta]:
            starts[cta]["first"] = items[cta][0][0]
    arrivals = np.zeros(len(merges), np.uint32)
    data = np.concatenate([part.view(np.uint8) for part in (header, starts, *everything, *merges, arrivals)])
    memory = np.zeros(len(data) + 128, np.uint8)  # a kernel reads the first item of a CTA that has none
    memory[: len(data)] = data
    partial_out = torch.full((partial + 1, case.value_dim), math.nan)
    return Planned(memory, num_ctas, partial_out, torch.full((partial + 1,), math.nan))


@functools.cache
def _scalar(number: float) -> torch.Tensor:
    """A tensor that stays, as kernels get its address."""
    return torch.tensor([number])


def attention_params(
    case: Case, rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor], sinks: torch.Tensor | None, **own: Any
) -> native.AttentionParams:
    """A kernel's parameters: q, out and lse of the rows, what each case has, and `own`."""
    q, out, lse = rows
    return native.AttentionParams(
        q=q.data_ptr(),
        out=out.data_ptr(),
        lse=lse.data_ptr(),
        q_row_stride=q.stride(0),
        q_head_stride=q.stride(1),
        out_row_stride=out.stride(0),
        out_head_stride=out.stride(1),
        sinks=None if sinks is None else sinks.data_ptr(),
        score_scale=case.score_scale,
        value_scale=1.0 if case.o_scale == "tensor" else 1.0 / case.out_divisor,
        out_scale=_scalar(case.out_divisor).data_ptr() if case.o_scale == "tensor" else None,
        num_q_heads=case.num_q_heads,
        **own,
    )


def merge(case: Case, params: native.AttentionParams) -> None:
    """Merges the partial results of a plan's two CTAs into out and lse."""
    merged = native.MergeParams(
        plan=params.plan,
        partial_out=params.partial_out,
        partial_lse=params.partial_lse,
        out=params.out,
        lse=params.lse,
        out_row_stride=params.out_row_stride,
        out_head_stride=params.out_head_stride,
        head_dim_vo=case.value_dim,
        num_q_heads=case.num_q_heads,
        group=params.group,
    )
    element = {"bfloat16": "Bf16", "float16": "Half", "float32": "float"}[case.out_type]
    flags = (f"-DOUT={element}", "-DBY_COLUMNS=1")
    ctypes.CDLL(str(shared_library("merge.cpp", first_include="hopper", flags=flags))).merge(ctypes.byref(merged), 2)
