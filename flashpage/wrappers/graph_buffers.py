"""Graph mode: the constructor's buffers, under FlashInfer's names."""

from __future__ import annotations

import torch

from ..base import checks, tensor_memory
from ..base.errors import PlanError
from ..plan.capacity import Capacity
from ..plan.lengths import check_numbers
from .base import Attention

# Graph buffers by kind: numbers of requests, page numbers, or a mask's.
_BUFFERS = {
    "qo_indptr": "indptr",
    "kv_indptr": "indptr",
    "kv_indices": "indices",
    "kv_len_arr": "requests",
    "qo_indptr_buf": "indptr",
    "paged_kv_indptr_buf": "indptr",
    "kv_indptr_buf": "indptr",
    "paged_kv_last_page_len_buf": "requests",
    "paged_kv_indices_buf": "indices",
    "custom_mask_buf": "mask",
    "mask_indptr_buf": "mask",
}


def take_graph_buffers(
    attention: Attention, capacity: Capacity | None, buffers: dict[str, torch.Tensor | None]
) -> None:
    """Kernels read the plan, page numbers and mask bits; the other buffers fix the batch if no capacity does."""
    session = attention.session
    counts: dict[str, int] = {}  # requests that a buffer is for
    if capacity is not None:
        session.use_capacity(capacity)
    for name, buffer in buffers.items() if session.is_graph else ():
        kind = _BUFFERS[name.removesuffix("fer")]
        if capacity is not None and buffer is not None and kind != "mask":
            raise PlanError(f"max_batch={capacity.batch} and {name} both size the batch: pass one of them.")
        if buffer is None:
            if kind == "mask" or capacity is not None:
                continue
            raise PlanError(f"{name}=None with use_cuda_graph=True: pass the buffer that captured runs read.")
        checks.tensor(buffer, name, PlanError)
        checks.same_device(buffer, attention.device, name, PlanError)
        tensor_memory.address(buffer, name, PlanError)
        if buffer.dim() != 1 or not buffer.is_contiguous():
            found = f"shape {tuple(buffer.shape)} and strides {tuple(buffer.stride())}"
            raise PlanError(f"{name} has {found}: pass one dimension, contiguous.")
        if kind in ("indptr", "requests"):
            check_numbers(buffer, name)
        if kind == "indices":
            if buffer.dtype != torch.int32:
                raise PlanError(f"{name} has dtype {buffer.dtype}: pass int32, which captured kernels read.")
            if not buffer.numel():
                raise PlanError(f"{name}: the wrapper's indices buffer holds 0 entries: pass the most of any plan.")
            session.indices.use_buffer(buffer)
        elif name == "custom_mask_buf":
            session.mask.buffer = buffer
        elif kind != "mask":
            counts[name] = buffer.numel() - (kind == "indptr")
    if len(set(counts.values())) > 1:
        found = ", ".join(f"{name} for {count} requests" for name, count in counts.items())
        raise PlanError(f"{found}: pass buffers for one batch size.")
    for count in counts.values():
        session.batch.fix_requests(count)
