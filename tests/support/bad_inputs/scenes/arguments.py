"""Good arguments that several scenes share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..scene import DIM, HEADS, KV_HEADS, PAGE, Arguments, Make


def heads(dim: str = "head_dim", page: bool = True) -> Arguments:
    return {"num_qo_heads": HEADS, "num_kv_heads": KV_HEADS, dim: DIM} | ({"page_size": PAGE} if page else {})


def pages(make: Make, prefix: str = "") -> Arguments:
    names = (f"{prefix}indptr", f"{prefix}indices", f"{prefix}last_page_len")
    return dict(zip(names, (make.ints(0, 2, 3), make.ints(5, 2, 7), make.ints(3, 16)), strict=True))


def decode_plan(make: Make) -> Arguments:
    return pages(make) | heads() | {"q_data_type": make.dtype}


def prefill_plan(make: Make) -> Arguments:
    return {"qo_indptr": make.ints(0, 2, 5)} | pages(make, "paged_kv_") | heads("head_dim_qk") | types(make)


def ragged_plan(make: Make) -> Arguments:
    lengths = {"qo_indptr": make.ints(0, 2, 5), "kv_indptr": make.ints(0, 20, 30)}
    return lengths | heads("head_dim_qk", page=False) | types(make)


def types(make: Make) -> Arguments:
    return {"q_data_type": make.dtype}


def plan_extras(make: Make, lens: tuple[int, int] = (19, 16), **more: Any) -> Arguments:
    found = {"seq_lens": make.ints(*lens), "sm_scale": 0.125, "kv_data_type": make.dtype, "o_data_type": make.dtype}
    return found | {"window_left": 20, "fixed_split_size": 128} | more


def mask_extras(make: Make, values: int = 86, nbytes: int = 11) -> Arguments:
    bits = {"custom_mask": make.bits(values)}
    return bits | {"packed_custom_mask": torch.full((nbytes,), 255, dtype=torch.uint8, device=make.device)}


def paged_run(rows: int) -> Callable[[Make], Arguments]:
    return lambda make: {"q": make.data(rows, HEADS, DIM), "paged_kv_cache": make.cache()}


def ragged_run(make: Make) -> Arguments:
    k, v = make.data(30, KV_HEADS, DIM), make.data(30, KV_HEADS, DIM)
    return {"q": make.data(5, HEADS, DIM), "k": k, "v": v}


def run_extras(rows: int) -> Callable[[Make], Arguments]:
    def make_them(make: Make) -> Arguments:
        outputs = {"out": make.empty(rows, HEADS, DIM), "lse": make.empty(rows, HEADS, dtype=torch.float32)}
        scales = {"q_scale": make.ones(1), "k_scale": make.ones(1), "v_scale": make.ones(1)}
        return outputs | scales | {"sinks": make.floats(HEADS), "window_left": 20}

    return make_them


def workspace(make: Make) -> Arguments:
    return {"float_workspace_buffer": make.workspace()}


def workspaces(make: Make) -> Arguments:
    return workspace(make) | {"int_workspace_buffer": make.workspace()}


def capacity(make: Make) -> Arguments:
    return {"max_batch": 4, "max_pages": 16, "max_rows": 8}
