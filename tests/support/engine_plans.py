"""Planning functions like those of engines: they write a wrapper's attributes and call `_cached_module.plan`."""

from __future__ import annotations

from typing import Any

import torch
from api_batch import DIM, HEADS, KV_HEADS, KV_LENS, PAGE, PAGES, ROWS, Batch, indptr_of

import flashpage

SHAPE = (HEADS, KV_HEADS, DIM, PAGE)
DTYPE = torch.float32


class Lengths:
    """Another batch with as many requests over the same cache, as numbers on the host."""

    def __init__(self, rows: tuple[int, ...], kv_lens: tuple[int, ...]) -> None:
        counts = tuple(-(-n // PAGE) for n in kv_lens)
        self.qo_indptr, self.kv_indptr = indptr_of(rows), indptr_of(counts)
        self.kv_lens = torch.tensor(kv_lens).int()
        self.last_page_len = torch.tensor([(n - 1) % PAGE + 1 if n else 0 for n in kv_lens]).int()
        self.indices = torch.arange(sum(counts)).flip(0).int()
        self.q = torch.randn(sum(rows), HEADS, DIM, generator=torch.Generator().manual_seed(2))

    @property
    def batch_size(self) -> int:
        return len(self.kv_lens)

    def pages(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.kv_indptr, self.indices, self.last_page_len


FIRST = Lengths(ROWS, KV_LENS)
OTHER = Lengths((1, 4, 0, 2), (17, 30, 0, 2))
ONE_ROW = Lengths((1, 1, 1, 1), (17, 30, 0, 2))
TWO_ROWS = Lengths((2, 2, 2, 2), (17, 30, 0, 2))
INDPTR, LAST = torch.zeros(5, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)


def workspace() -> torch.Tensor:
    return torch.empty(4 << 20, dtype=torch.uint8)


def prefill(graph: bool = False, masked: bool = False) -> Any:
    buffers: dict[str, Any] = {}
    if graph:
        buffers = {"qo_indptr_buf": INDPTR.clone(), "paged_kv_indptr_buf": INDPTR.clone(), "use_cuda_graph": True}
        buffers |= {"paged_kv_indices_buf": torch.zeros(PAGES, dtype=torch.int32)}
        buffers |= {"paged_kv_last_page_len_buf": LAST.clone()}
    if graph and masked:
        buffers |= {"custom_mask_buf": torch.zeros(512, dtype=torch.uint8), "mask_indptr_buf": INDPTR.clone()}
    return flashpage.BatchPrefillWithPagedKVCacheWrapper(workspace(), backend="fa2", **buffers)


def decode(graph: bool = False, tensor_cores: bool = False) -> Any:
    buffers: dict[str, Any] = {}
    if graph:
        buffers = {"paged_kv_indptr_buffer": INDPTR.clone(), "paged_kv_last_page_len_buffer": LAST.clone()}
        buffers |= {"paged_kv_indices_buffer": torch.zeros(PAGES, dtype=torch.int32), "use_cuda_graph": True}
    return flashpage.BatchDecodeWithPagedKVCacheWrapper(workspace(), use_tensor_cores=tensor_cores, **buffers)


def plan(wrapper: Any, lengths: Lengths, **options: Any) -> None:
    wrapper.plan(lengths.qo_indptr, *lengths.pages(), *SHAPE, q_data_type=DTYPE, **options)


def outputs(wrapper: Any, lengths: Lengths, batch: Batch, **options: Any) -> torch.Tensor:
    return torch.cat([t.flatten() for t in wrapper.run(lengths.q, batch.cache, return_lse=True, **options)])


def engine_prefill_plan(
    wrapper: Any,
    lengths: Lengths,
    *,
    causal: bool = False,
    window_left: int = -1,
    fixed_split_size: int | None = None,
    q_data_type: Any = DTYPE,
    items: tuple[Any, Any, int, Any] = (None, None, 0, None),
    packed_mask: tuple[torch.Tensor, torch.Tensor] | None = None,
    written: dict[str, Any] | None = None,
    not_written: tuple[str, ...] = (),
    changed: dict[int, Any] | None = None,
) -> None:
    """Plans as an engine does for a graph's replay: from host numbers, so nothing is read back from the device.
    `written` (attributes) and `changed` (arguments, by position) replace the engine's values."""
    assert wrapper._backend == "fa2" and wrapper._cached_module is not None
    rows = int(lengths.qo_indptr[-1])
    if wrapper._max_total_num_rows is None:
        wrapper._max_total_num_rows = rows
    numbers = {
        "_qo_indptr_last": rows,
        "_max_q_len": int(lengths.qo_indptr.diff().max()),
        "_max_kv_len": int(lengths.kv_lens.max()),
        "_batch_size": lengths.batch_size,
        "_num_qo_heads": HEADS,
        "_num_kv_heads": KV_HEADS,
        "_prefix_len_ptr": items[0],
        "_token_pos_in_items_ptr": items[1],
        "_token_pos_in_items_len": items[2],
        "_max_item_len_ptr": items[3],
        "_cached_q_data_type": q_data_type,
        "_cached_kv_data_type": q_data_type,
        "_cached_o_data_type": None,
        "_block_tables": None,
    }
    for name, value in (numbers | (written or {})).items():
        if name not in not_written:
            setattr(wrapper, name, value)
    if wrapper.is_cuda_graph_enabled:
        wrapper._qo_indptr_buf.copy_(lengths.qo_indptr)
        wrapper._paged_kv_indptr_buf.copy_(lengths.kv_indptr)
        wrapper._paged_kv_last_page_len_buf.copy_(lengths.last_page_len)
        wrapper._paged_kv_indices_buf[: len(lengths.indices)].copy_(lengths.indices)
    else:
        wrapper._paged_kv_indices_buf = lengths.indices
    if packed_mask is not None:
        wrapper._custom_mask_buf[: len(packed_mask[0])].copy_(packed_mask[0])
        wrapper._mask_indptr_buf.copy_(packed_mask[1])
    arguments = [wrapper._float_workspace_buffer, wrapper._int_workspace_buffer]
    arguments += [wrapper._pin_memory_int_workspace_buffer, lengths.qo_indptr, lengths.kv_indptr, lengths.kv_lens]
    arguments += [max(rows, wrapper._max_total_num_rows), lengths.batch_size, *SHAPE[:2], PAGE]
    arguments += [wrapper.is_cuda_graph_enabled, DIM, DIM, causal, window_left]
    arguments += [-1 if fixed_split_size is None else fixed_split_size, False, 0, 0]
    for position, value in (changed or {}).items():
        arguments[position] = value
    wrapper._plan_info = wrapper._cached_module.plan(*arguments)


def engine_decode_plan(
    wrapper: Any, lengths: Lengths, *, window_left: int = -1, soft_cap: float = 0.0, q_len_per_req: int = 1
) -> None:
    """Plans decode as engines do: with the arguments of either of FlashInfer's kernels, and with options of later runs
    written as attributes."""
    wrapper._q_len_per_req = q_len_per_req
    if not wrapper.is_cuda_graph_enabled:
        wrapper._paged_kv_indptr_buf = lengths.kv_indptr
        wrapper._paged_kv_indices_buf = lengths.indices
        wrapper._paged_kv_last_page_len_buf = lengths.last_page_len
    memory = (wrapper._float_workspace_buffer, wrapper._int_workspace_buffer, wrapper._pin_memory_int_workspace_buffer)
    numbers = (lengths.batch_size, *SHAPE[:2], PAGE, wrapper.is_cuda_graph_enabled)
    if wrapper.use_tensor_cores:
        q_indptr = torch.arange(lengths.batch_size + 1, dtype=torch.int32) * q_len_per_req
        arrays = (q_indptr, lengths.kv_indptr, lengths.kv_lens, lengths.batch_size * q_len_per_req)
        rest = (DIM, DIM, q_len_per_req > 1, window_left, -1, False, 0, q_len_per_req if q_len_per_req > 1 else 0)
        info = wrapper._cached_module.plan(*memory, *arrays, *numbers, *rest)
    else:
        types = (torch.empty(0, dtype=DTYPE), torch.empty(0, dtype=DTYPE))
        rest = (window_left, soft_cap, DIM, DIM, *types)
        info = wrapper._cached_module.plan(*memory, lengths.kv_indptr, *numbers, *rest)
    wrapper._plan_info = info
    wrapper._window_left, wrapper._logits_soft_cap, wrapper._sm_scale = window_left, soft_cap, None
    wrapper._pos_encoding_mode, wrapper._rope_scale, wrapper._rope_theta = "NONE", None, None
