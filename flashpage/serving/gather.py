"""Gathers a batch's page numbers from a table of slots into the list that plans take."""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from .. import jit, native
from ..base import checks, tensor_memory
from ..base.errors import RunError
from ..kernels.spec import KernelSpec
from ..plan.session import current_stream

_CTAS = 264  # enough to saturate the memory of any card; with fewer requests, several CTAs share one
_SPEC = KernelSpec("gather_slots")


def gather_slots(
    table: torch.Tensor,
    rows: torch.Tensor,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    starts: torch.Tensor | None = None,
    page_size: int = 1,
) -> None:
    """indices[indptr[r] + i] = table[rows[r], starts[r] + i * page_size] // page_size, for every page i of request r.

    All tensors are int32, contiguous and on one device; of the table only the rows must be contiguous.

    Args:
        table: [requests of the pool, tokens], the slot of each token.
        rows: [batch], each request's row of the table.
        indptr: [batch + 1], where each request's pages begin in `indices`.
        indices: at least indptr[batch] entries, written. Further entries are left as they are.
        starts: [batch], tokens to skip at the front, multiples of page_size; None: none.
        page_size: tokens in a page; its tokens lie in adjacent slots, the first at a multiple of page_size.
    """
    page_size = checks.whole("page_size", page_size, 1, error=RunError)
    batch = checks.tensor(rows, "rows", RunError).numel()
    checks.tensor(table, "table", RunError)
    given = {"table": table, "rows": rows, "indptr": indptr, "indices": indices}
    if starts is not None:
        given["starts"] = starts
    for name, tensor in given.items():
        _check(name, tensor, 2 if name == "table" else 1, rows.device)
    for name, count in (("indptr", batch + 1), ("starts", batch)):
        if name in given and given[name].numel() != count:
            raise RunError(f"{name} has {given[name].numel()} entries but rows has {batch}: pass {count}.")
    if batch == 0:
        return
    if table.is_cpu:
        _check_numbers(table, rows, indptr, indices, starts, page_size)
    ctas_per_request = max(1, _CTAS // batch)
    params = native.GatherSlotsParams(
        table=table.data_ptr(),
        rows=rows.data_ptr(),
        starts=None if starts is None else starts.data_ptr(),
        indptr=indptr.data_ptr(),
        indices=indices.data_ptr(),
        table_row_stride=table.stride(0),
        batch=batch,
        page=native.make_fast_div(page_size),
        ctas_per_request=native.make_fast_div(ctas_per_request),
    )
    if table.is_cpu:
        native.check(native.load().fp_cpu_gather_slots(ctypes.byref(params)))
        return
    kernel, grid = jit.get_kernel(_SPEC, table.device), batch * ctas_per_request
    stream = current_stream(table.device.index)
    native.check(native.load().fp_launch(kernel.handle, ctypes.byref(params), grid, stream, 0))


def _check(name: str, tensor: torch.Tensor, dims: int, device: torch.device) -> None:
    checks.tensor(tensor, name, RunError)
    tensor_memory.address(tensor, name, RunError)
    checks.same_device(tensor, device, name, RunError)
    if tensor.dim() != dims or tensor.dtype != torch.int32 or (tensor.numel() > 1 and tensor.stride(-1) != 1):
        raise RunError(
            f"{name} has shape {tuple(tensor.shape)}, strides {tuple(tensor.stride())} and dtype {tensor.dtype}. "
            f"Pass int32 with {dims} dimension{'s' * (dims > 1)}, the last one contiguous."
        )


def _check_numbers(
    table: torch.Tensor,
    rows: torch.Tensor,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    starts: torch.Tensor | None,
    page_size: int,
) -> None:
    """Checks the numbers themselves, which is possible on the host only."""
    rows_given, pages = rows.numpy(), indptr.numpy()  # numpy needs a tenth of torch's time for so few numbers
    counts = np.diff(pages.astype(np.int64))
    if pages[0] < 0 or counts.min() < 0 or pages[-1] > indices.numel():
        raise RunError(f"indptr must rise from 0 to at most {indices.numel()}, the entries of indices.")
    least, most = int(rows_given.min()), int(rows_given.max())
    if least < 0 or most >= len(table):
        raise RunError(
            f"rows has numbers from {least} to {most} but table has {len(table)} rows. "
            "Pass numbers from 0 on, each less than the number of rows."
        )
    first = np.zeros_like(counts) if starts is None else starts.numpy()
    ends = np.where(counts > 0, first + (counts - 1) * page_size + 1, 0)
    if first.min() < 0 or ends.max() > table.shape[1]:
        raise RunError(f"indptr and starts reach past the {table.shape[1]} tokens of a table row: pass fewer pages.")
