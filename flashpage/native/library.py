"""The host library (csrc/) through ctypes: its structs and functions."""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, c_char, c_char_p, c_double, c_float, c_int32, c_int64, c_uint32, c_void_p
from typing import Any

from ..base import paths
from ..base.errors import DeviceError, FlashpageError, PlanError
from .records import RECORDS

ABI_VERSION = 13  # csrc/abi.cpp

OK, BAD_LENGTHS, WORKSPACE_TOO_SMALL, CUDA_ERROR, NO_CUDA, INTERNAL, OTHER_TENSORS = range(7)  # fp_status


def _all(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


# include/flashpage/params/params.h. Comments on meaning, shape and unit are there.


class FastDiv(ctypes.Structure):
    _fields_ = _all(c_uint32, "divisor multiplier shift")


class KvView(ctypes.Structure):
    _fields_ = [("data", c_void_p), *_all(c_int64, "page_stride token_stride head_stride")]


class AttentionParams(ctypes.Structure):
    _fields_ = [
        *_all(c_void_p, "q out lse"),
        *_all(c_int64, "q_row_stride q_head_stride out_row_stride out_head_stride"),
        *_all(KvView, "k v"),
        *_all(c_void_p, "kv_indices plan partial_out partial_lse custom_mask lane_bits sinks q_scale k_scale v_scale"),
        *_all(c_int32, "q_scale_stride k_scale_stride v_scale_stride"),
        *_all(c_float, "score_scale value_scale"),
        *_all(c_int32, "num_q_heads num_kv_heads causal window_left"),
        *_all(c_float, "rope_scale rope_theta"),
        *_all(FastDiv, "group page"),
        ("trace", c_void_p),
        *_all(c_int32, "box_tokens query_box_rows num_kv_indices out_box_rows cta_rows"),
    ]


class VariantTensor(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("stride", c_int64 * 4)]


class VariantArgs(ctypes.Structure):
    _fields_ = [("tensors", VariantTensor * 8), ("scalars", c_double * 8)]


class MaskTilesParams(ctypes.Structure):
    _fields_ = [
        *_all(c_void_p, "plan custom_mask cells"),
        *_all(c_int64, "queue_begin list_begin lanes_begin"),
        ("group", FastDiv),
        *_all(c_int32, "tile_q tile_kv tile_heads causal window_left"),
    ]


class MergeParams(ctypes.Structure):
    _fields_ = [
        *_all(c_void_p, "plan partial_out partial_lse out lse"),
        *_all(c_int64, "out_row_stride out_head_stride"),
        *_all(c_int32, "head_dim_vo num_q_heads"),
        ("group", FastDiv),
    ]


class MergeStatesParams(ctypes.Structure):
    _fields_ = [
        *_all(c_void_p, "v s v_other s_other mask out lse"),
        *_all(c_int64, "v_state_stride v_row_stride v_head_stride s_state_stride s_row_stride"),
        *_all(c_int32, "num_states rows num_heads head_dim"),
    ]


class AppendParams(ctypes.Structure):
    _fields_ = [
        *_all(c_void_p, "append_key append_value"),
        *_all(c_int64, "key_row_stride key_head_stride value_row_stride value_head_stride"),
        *_all(KvView, "k v"),
        *_all(c_void_p, "batch_indices positions kv_indptr kv_indices"),
        *_all(c_int32, "nnz num_kv_heads head_dim_qk head_dim_vo"),
        ("page", FastDiv),
    ]


class GatherSlotsParams(ctypes.Structure):
    _fields_ = [
        *_all(c_void_p, "table rows starts indptr indices"),
        ("table_row_stride", c_int64),
        ("batch", c_int32),
        *_all(FastDiv, "page ctas_per_request"),
    ]


class GatherRowsParams(ctypes.Structure):
    _fields_ = [
        *_all(KvView, "k v"),
        *_all(c_void_p, "kv_indices k_rows v_rows"),
        *_all(FastDiv, "k_row_vectors v_row_vectors token_vectors"),
        *_all(c_int32, "k_token_vectors v_token_vectors first count"),
    ]


# include/flashpage/params/block_params.h


class BlockPattern(ctypes.Structure):
    _fields_ = [*_all(FastDiv, "block_size stride"), *_all(c_int32, "local_blocks first head_step kv_head_step")]


class BlockAttentionParams(ctypes.Structure):
    _fields_ = [
        *_all(c_void_p, "q out"),
        *_all(c_int64, "q_row_stride q_head_stride out_row_stride out_head_stride"),
        *_all(c_void_p, "k v"),
        *_all(c_int64, "k_block_stride k_head_stride v_block_stride v_head_stride"),
        ("block_tables", c_void_p),
        ("table_stride", c_int64),
        *_all(c_void_p, "seq_lens alibi_slopes k_scale v_scale partial_out partial_lse cuts"),
        *_all(c_void_p, "tmp_out exp_sums max_logits"),
        ("pattern", BlockPattern),
        ("score_scale", c_float),
        *_all(c_int32, "num_seqs num_q_heads num_kv_heads head_dim group tile_q row_tiles"),
        *_all(c_int32, "max_tokens log_block_size partitions"),
    ]


class BlockWriteParams(ctypes.Structure):
    _fields_ = [
        *_all(c_void_p, "key value"),
        *_all(c_int64, "key_row_stride key_head_stride value_row_stride value_head_stride"),
        *_all(c_void_p, "k v"),
        *_all(c_int64, "k_block_stride k_slot_stride k_head_stride v_block_stride v_slot_stride v_head_stride"),
        *_all(c_void_p, "slots k_scale v_scale"),
        *_all(c_int32, "slots_are_int64 num_tokens num_kv_heads key_dim value_dim"),
        ("block_size", FastDiv),
    ]


# csrc/flashpage.h


class IndexArray(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("stride", c_int64), *_all(c_int32, "is_int64 length")]


class ProblemStruct(ctypes.Structure):
    _fields_ = [
        *_all(c_int32, "batch q_len_per_request"),
        *_all(IndexArray, "q_indptr kv_indptr last_page_len kv_lens"),
        *_all(c_int32, "page_size num_q_heads num_kv_heads causal window_left has_custom_mask has_mask_tiles"),
        *_all(c_int32, "least_rows most_rows"),
    ]


class Schedule(ctypes.Structure):
    _fields_ = [
        *_all(c_int32, "num_ctas walk tile_q tile_kv"),
        *_all(c_float, "ns_per_token ns_per_unit few_rows_cost ns_per_piece ns_per_merge"),
        *_all(c_int32, "min_piece_tokens max_pieces fixed_piece_tokens merge_rows wave_tokens are_claimed"),
        ("clusters", c_int32 * 5),  # of 1, 2, 4, 8, 16 CTAs
        *_all(c_int32, "cluster_rows cluster_piece_tokens"),
        *_all(c_float, "full_speed_share ns_per_cluster_merge"),
    ]


class Tables(ctypes.Structure):
    _fields_ = [
        *_all(c_void_p, "q_indptr seq_lens table_rows num_requests"),
        ("table_stride", c_int64),
        *_all(c_int32, "num_table_rows table_columns lens_are_int64 rows_are_int64"),
        *_all(c_int32, "batch q_len_per_request max_rows page_size"),
        *_all(c_int32, "num_q_heads num_kv_heads causal window_left"),
    ]


class PlanResult(ctypes.Structure):
    _fields_ = [
        *_all(c_int32, "num_ctas num_items num_merges num_partial_rows"),
        *_all(c_int64, "used_bytes total_q total_kv total_pages"),
        *_all(c_int32, "max_q_len max_kv_len"),
        *_all(c_double, "cost_total_ns cost_max_ns"),
        ("cluster_size", c_int32),
        *_all(c_int64, "mask_bytes tile_cells"),
        *_all(c_int32, "error_array error_reason"),
        *_all(c_int64, "error_index error_value error_limit"),
    ]


class Parts(ctypes.Structure):
    _fields_ = [
        *_all(c_int32, "most_few_rows few_ctas"),
        *_all(c_float, "full_speed_share least_gain_ns"),
        ("most_partial_rows", c_int64),
        *_all(c_void_p, "whole few many"),
        *_all(c_int64, "few_requests few_rows many_requests many_rows"),
        *_all(c_double, "whole_ns parts_ns"),
        *_all(c_int64, "second_offset second_partial_row"),
        ("schedules", Schedule * 2),
        ("results", PlanResult * 2),
    ]


class MaskedBatch(ctypes.Structure):
    _fields_ = [
        *_all(c_int64, "mask_bytes tile_cells rows"),
        *_all(c_int32, "requests num_q_heads num_kv_heads has_custom_mask tile_heads"),
    ]


class KernelInfo(ctypes.Structure):
    _fields_ = [
        *_all(c_int32, "threads shared_bytes ctas_per_sm num_sms registers local_bytes cluster_rows"),
        ("clusters", c_int32 * 5),
    ]


class DeviceInfo(ctypes.Structure):
    _fields_ = [
        ("name", c_char * 128),
        *_all(c_int32, "sm num_sms"),
        *_all(c_int64, "memory_bytes l2_bytes"),
        *_all(c_int32, "shared_bytes_per_cta shared_bytes_per_sm clock_khz memory_khz memory_bus_bits driver_version"),
    ]


class BoxForm(ctypes.Structure):
    _fields_ = [("element_bytes", c_int32), ("box", c_int32 * 4), ("dims", c_int64 * 4), ("strides", c_int64 * 3)]


class KvBoxes(ctypes.Structure):
    _fields_ = _all(BoxForm, "k v q out")


class SecondPart(ctypes.Structure):
    _fields_ = [
        *_all(c_void_p, "fork attention merge plan partial_out partial_lse boxes"),
        *_all(c_int32, "num_ctas merge_ctas box_tokens query_box_rows out_box_rows cta_rows"),
    ]


class RunArgs(ctypes.Structure):
    _fields_ = [
        *_all(c_void_p, "attention merge params variant merge_params stream"),
        *_all(c_int32, "num_ctas merge_ctas enable_pdl out_dtype cluster_size"),
        *_all(c_void_p, "boxes mask_tiles_params mask_tiles second gather_rows gather_params"),
    ]


class Python(ctypes.Structure):
    _fields_ = _all(
        c_void_p, "long_from_long long_as_void_ptr err_clear eval_save_thread eval_restore_thread none tensors"
    )


class TensorForm(ctypes.Structure):
    _fields_ = [*_all(c_int32, "device_type device_index dtype dims"), *_all(c_int64 * 5, "shape strides")]


class BoundRun(ctypes.Structure):
    _fields_ = [
        *_all(c_void_p, "args params merge_params k_view v_view"),
        *_all(c_int64, "v_offset alignment_mask"),
        *_all(TensorForm, "q k v out lse"),
    ]


class LengthsStruct(ctypes.Structure):
    _fields_ = _all(c_void_p, "problem copies") + _all(c_int64, "bytes_of_a_copy kv_begin kv_end least_rows most_rows")


class SlotsCall(ctypes.Structure):
    _fields_ = [*_all(c_void_p, "slots problem destination"), ("capacity", c_int64), ("result", c_void_p)]


STRUCTS = (
    *(FastDiv, KvView, AttentionParams, VariantTensor, VariantArgs, MergeParams, MergeStatesParams, AppendParams),
    *(GatherSlotsParams, GatherRowsParams, BlockPattern, BlockAttentionParams, BlockWriteParams, MaskTilesParams),
    *(IndexArray, ProblemStruct, Schedule, Tables, PlanResult, Parts, MaskedBatch),
    *(KernelInfo, DeviceInfo, BoxForm, KvBoxes, SecondPart, RunArgs),
    *(Python, TensorForm, BoundRun, LengthsStruct, SlotsCall),
)
# Structs are passed as ctypes.byref(struct), or as an address that was taken once: an int costs 0.04 us less a call.
_FUNCTIONS: dict[str, tuple[type | None, list[type]]] = {
    "fp_last_error": (c_char_p, []),
    "fp_abi_version": (c_int32, []),
    "fp_sizeof": (c_int64, [c_char_p]),
    "fp_plan": (c_int32, [c_void_p, c_void_p, c_void_p, c_int64, c_void_p]),
    "fp_plan_bounds": (
        c_int32,
        [c_int32, c_int64, c_int64, c_int32, c_int32, c_void_p, POINTER(c_int64), POINTER(c_int64)],
    ),
    "fp_tables_bounds": (c_int32, [c_void_p, c_void_p, POINTER(c_int64), POINTER(c_int64)]),
    "fp_tables_plan": (c_int32, [c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_int32]),
    "fp_mask_cells": (c_int64, [c_void_p, c_void_p, c_void_p]),
    "fp_parts_count": (None, [c_void_p, c_void_p]),
    "fp_fork_create": (c_void_p, [c_int32]),
    "fp_fork_destroy": (None, [c_void_p]),
    "fp_slots_create": (c_void_p, [c_int32, c_int64]),
    "fp_slots_destroy": (None, [c_void_p]),
    "fp_slots_plan": (c_int32, [c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_void_p]),
    "fp_slots_copy": (c_int32, [c_void_p, c_void_p, c_int64, c_void_p, c_void_p]),
    "fp_slots_last": (c_void_p, [c_void_p]),
    "fp_kernel_from_function": (c_void_p, [c_void_p]),
    "fp_cuda_device_count": (c_int32, []),
    "fp_cuda_device_info": (c_int32, [c_int32, POINTER(DeviceInfo)]),
    "fp_cuda_kernel_load": (c_void_p, [c_int32, c_char_p, c_int64, c_char_p]),
    "fp_kernel_destroy": (None, [c_void_p]),
    "fp_kernel_describe": (c_int32, [c_void_p, POINTER(KernelInfo)]),
    "fp_run": (c_int32, [c_void_p]),
    "fp_find_mask_tiles": (c_int32, [c_void_p, c_void_p, c_void_p]),
    "fp_launch": (c_int32, [c_void_p, c_void_p, c_int32, c_void_p, c_int32]),
    "fp_python_set": (c_int32, [c_void_p]),
    "fp_cpu_threads": (c_int32, []),
    "fp_cpu_set_threads": (c_int32, [c_int32]),
    "fp_cpu_features": (c_int32, [c_char_p, c_int32]),
    "fp_cpu_merge_states": (c_int32, [c_void_p, c_int32]),
    "fp_cpu_append": (c_int32, [c_void_p, c_int32]),
    "fp_cpu_gather_slots": (c_int32, [c_void_p]),
}


@functools.cache
def load() -> ctypes.CDLL:
    """The host library, loaded once a process; its structs are checked against the mirrors above."""
    path = paths.library()
    if not path.is_file():
        raise FlashpageError(f"the host library {path} is missing: build it with `python setup.py build_host`")
    library = ctypes.CDLL(str(path))
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    _check_layout(library, path)
    return library


def _check_layout(library: ctypes.CDLL, path: object) -> None:
    rebuild = "rebuild it with `python setup.py build_host`"
    if (version := library.fp_abi_version()) != ABI_VERSION:
        raise FlashpageError(f"{path} has ABI version {version}, this package needs {ABI_VERSION}: {rebuild}")
    sizes = {struct.__name__: ctypes.sizeof(struct) for struct in STRUCTS}
    sizes |= {name: record.itemsize for name, record in RECORDS.items()}
    for name, size in sizes.items():
        if (found := library.fp_sizeof(name.encode())) != size:
            raise FlashpageError(
                f"{path}: {name} has {found} bytes, flashpage/native/library.py says {size}: {rebuild}"
            )


def last_error() -> str:
    """What the last failed call of this thread said."""
    return load().fp_last_error().decode(errors="replace")


def check(status: int) -> None:
    """Raises what a status says: PlanError for lengths and workspaces, DeviceError for the rest."""
    if status == OK:
        return
    raise (PlanError if status in (BAD_LENGTHS, WORKSPACE_TOO_SMALL) else DeviceError)(last_error())


def check_handle(handle: int | None) -> int:
    """The handle; raises DeviceError where a function that makes one returned null."""
    if not handle:
        raise DeviceError(last_error())
    return handle


def make_fast_div(divisor: int) -> FastDiv:
    """The struct that divides by `divisor` (include/flashpage/common/math.h, make_fast_div)."""
    assert 1 <= divisor < 2**31, divisor
    log = (divisor - 1).bit_length()
    if 1 << log == divisor:
        return FastDiv(divisor, 0, log)
    shift = log - 1
    return FastDiv(divisor, -(-(1 << (32 + shift)) // divisor), shift)
