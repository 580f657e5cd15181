"""Page numbers of a batch, gathered from a table of slots into the list that plans take."""

from __future__ import annotations

import ctypes

import torch

from .. import jit, native
from ..base import checks, tensor_memory
from ..base.errors import RunError
from ..kernels.spec import KernelSpec
from ..plan.session import current_stream

_CTAS = 264  # enough for any card to keep its memory busy; fewer requests get several each
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

    All tensors are int32 and on one device, contiguous but for the table, whose rows are.

    Args:
        table: [requests of the pool, tokens], the slot of each token.
        rows: [batch], each request's row of the table.
        indptr: [batch + 1], where each request's pages begin in `indices`.
        indices: at least indptr[batch] entries, written. Entries past those stay as they are.
        starts: [batch], tokens left out at the front, multiples of page_size; None: none.
        page_size: tokens a page; a page's tokens lie in adjacent slots, the first in a multiple of page_size.
    """
    batch = rows.numel()
    given = (("table", table, 2), ("rows", rows, 1), ("indptr", indptr, 1), ("indices", indices, 1))
    for name, tensor, dims in (*given, *((("starts", starts, 1),) if starts is not None else ())):
        _check(name, tensor, dims, table.device)
    for name, tensor, count in (("indptr", indptr, batch + 1), ("starts", starts, batch)):
        if tensor is not None and tensor.numel() != count:
            raise RunError(f"{name} has {tensor.numel()} entries but {count} are expected: rows has {batch}.")
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
            f"{name} has shape {tuple(tensor.shape)}, strides {tuple(tensor.stride())} and dtype {tensor.dtype}: pass "
            f"int32 of {dims} dimension{'s' * (dims > 1)}, the last one contiguous."
        )


def _check_numbers(
    table: torch.Tensor,
    rows: torch.Tensor,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    starts: torch.Tensor | None,
    page_size: int,
) -> None:
    """On the host numbers can be looked at."""
    counts = indptr.diff()
    if int(indptr[0]) < 0 or bool((counts < 0).any()) or int(indptr[-1]) > indices.numel():
        raise RunError(
            f"indptr={indptr.tolist()} must rise from 0 to at most the {indices.numel()} entries of indices."
        )
    if int(rows.min()) < 0 or int(rows.max()) >= len(table):
        raise RunError(f"rows={rows.tolist()} must be rows of the table, 0 to {len(table) - 1}.")
    first = counts.new_zeros(len(rows)) if starts is None else starts
    ends = torch.where(counts > 0, first + (counts - 1) * page_size + 1, 0)
    if bool((first < 0).any()) or int(ends.max()) > table.shape[1]:
        raise RunError(f"a request's pages reach past the {table.shape[1]} tokens of its row in the table.")
