"""Scenes of the wrappers that plan and run one attention."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..scene import DIM, HEADS, PAGE, PAGES, Arguments, Make, Scene, Step
from .arguments import (
    capacity,
    decode_plan,
    heads,
    mask_extras,
    paged_run,
    plan_extras,
    prefill_plan,
    ragged_plan,
    ragged_run,
    run_extras,
    types,
    workspace,
    workspaces,
)


def _paged(
    name: str, module: str, plan: Callable[[Make], Arguments], rows: int, *forward: str, dim: str = "head_dim"
) -> list[Scene]:
    """Scenes for each method of a paged wrapper."""
    made = Step(f"{module}:{name}", workspace, capacity)
    planned = Step(".plan", plan, lambda make: plan_extras(make) | (mask_extras(make) if rows > 2 else {}))
    ran = Step(".run", paged_run(rows), run_extras(rows))
    sizes = {"sizes": Step(".workspace_size", plan, plan_extras)} if rows == 2 else {}
    sizes["prewarm"] = Step(".prewarm_paged_kv_stride_variant", lambda make: {"variant": "independent"})

    def on_device(make: Make) -> Arguments:
        tables = {"seq_lens": make.ints(19, 16), "block_tables": make.ints(5, 2, 7, 0).view(2, 2)}
        first = {"qo_indptr": make.ints(0, 2, 5)} if rows > 2 else {}
        return first | tables | heads(dim) | types(make) | ({"max_rows": 5} if rows > 2 else {})

    def on_device_extras(make: Make) -> Arguments:
        return {"table_rows": make.ints(0, 1), "num_requests": make.ints(2)}

    scenes = [
        Scene(name, (made, planned, ran)),
        Scene(f"{name}.run_return_lse", (made, planned, Step(".run_return_lse", paged_run(rows), run_extras(rows)))),
        Scene(f"{name}.reset", (made, Step(".reset_workspace_buffer", workspaces), planned, ran)),
        Scene(f"{name}.plan_on_device", (made, Step(".plan_on_device", on_device, on_device_extras), ran)),
    ]
    scenes += [Scene(f"{name}.{way}", (made, planned, Step(f".{way}", paged_run(rows)))) for way in forward]
    return scenes + [Scene(f"{name}.{way}", (made, step)) for way, step in sizes.items()]


def _graph_decode() -> Scene:
    name = "CUDAGraphBatchDecodeWithPagedKVCacheWrapper"

    def buffers(make: Make) -> Arguments:
        lengths = {"indptr_buffer": make.ints(0, 0, 0), "last_page_len_buffer": make.ints(0, 0)}
        return {"workspace_buffer": make.workspace(), "indices_buffer": make.ints(0, 0, 0, 0)} | lengths

    made = Step(f"flashpage.decode:{name}", buffers)
    return Scene(name, (made, Step(".plan", decode_plan, plan_extras), Step(".run", paged_run(2), run_extras(2))))


def _fast_decode() -> Scene:
    made = Step("flashpage.decode:BatchDecodeWithPagedKVCacheWrapper", workspace)
    fast = Step("flashpage.decode:fast_decode_plan", decode_plan, on_object=True)
    return Scene("fast_decode_plan", (made, Step(".plan", decode_plan), fast, Step(".run", paged_run(2))))


def _ragged() -> list[Scene]:
    name = "BatchPrefillWithRaggedKVCacheWrapper"
    room = {"max_batch": 4, "max_kv_rows": 64, "max_rows": 8}
    made = Step(f"flashpage.prefill:{name}", workspace, lambda make: room)
    extras = lambda make: plan_extras(make, (20, 10)) | mask_extras(make, 70, 9)
    planned = Step(".plan", ragged_plan, extras)
    ways = [Scene(f"{name}.{way}", (made, planned, Step(f".{way}", ragged_run))) for way in ("forward",)]
    returned = Step(".run_return_lse", ragged_run, run_extras(5))
    reset = Step(".reset_workspace_buffer", workspaces)
    ran = Step(".run", ragged_run, run_extras(5))
    more = [
        Scene(f"{name}.run_return_lse", (made, planned, returned)),
        Scene(f"{name}.reset", (made, reset, planned, ran)),
    ]
    return [Scene(name, (made, planned, ran)), *ways, *more]


def _sink() -> Scene:
    name = "BatchAttentionWithAttentionSinkWrapper"

    def told(make: Make) -> Arguments:
        given = {"q_data_type": make.dtype, "kv_data_type": make.dtype, "head_dim_qk": DIM, "head_dim_vo": DIM}
        return workspace(make) | given

    planned = Step(".plan", prefill_plan, lambda make: plan_extras(make) | mask_extras(make))
    ran = Step(".run", lambda make: paged_run(5)(make) | {"sinks": make.floats(HEADS)}, run_extras(5))
    return Scene(name, (Step(f"flashpage.attention:{name}", told), planned, ran))


def _mixed() -> Scene:
    def plan(make: Make) -> Arguments:
        lengths = {"qo_indptr": make.ints(0, 2, 5), "kv_indptr": make.ints(0, 2, 3), "kv_indices": make.ints(5, 2, 7)}
        dims = {"head_dim_vo": DIM, "kv_data_type": make.dtype} | types(make)
        return lengths | {"kv_len_arr": make.ints(19, 16)} | heads("head_dim_qk") | dims

    run = lambda make: {"q": make.data(5, HEADS, DIM), "kv_cache": make.cache()}
    made = Step("flashpage.attention:BatchAttention", lambda make: {"device": make.device})
    return Scene("BatchAttention", (made, Step(".plan", plan), Step(".run", run, run_extras(5))))


def _latent() -> Scene:
    """Latent rows of 512 columns and 64 more of K."""

    def plan(make: Make) -> Arguments:
        lists = {"qo_indptr": make.ints(0, 2, 5), "kv_indptr": make.ints(0, 2, 3), "kv_indices": make.ints(5, 2, 7)}
        sizes = {"num_heads": 16, "head_dim_ckv": 512, "head_dim_kpe": 64, "page_size": PAGE, "sm_scale": 0.1}
        return lists | {"kv_len_arr": make.ints(19, 16)} | sizes | types(make)

    def run(make: Make) -> Arguments:
        rows = {"q_nope": make.data(5, 16, 512), "q_pe": make.data(5, 16, 64)}
        return rows | {"ckv_cache": make.data(PAGES, PAGE, 512), "kpe_cache": make.data(PAGES, PAGE, 64)}

    def extras(make: Make) -> Arguments:
        outputs = {"out": make.empty(5, 16, 512), "lse": make.empty(5, 16, dtype=torch.float32)}
        return outputs | {"sinks": make.floats(16)}

    made = Step("flashpage.mla:BatchMLAPagedAttentionWrapper", workspace)
    planned = Step(".plan", plan, lambda make: {"fixed_split_size": 128, "kv_data_type": make.dtype})
    steps = (made, planned, Step(".run", run, extras))
    return Scene("BatchMLAPagedAttentionWrapper", steps)


def _selected() -> Scene:
    """Rows of fp8 with scales, and a list of tokens for each row of q."""
    e4m3 = torch.float8_e4m3fn

    def plan(make: Make) -> Arguments:
        sizes = {"num_heads": 16, "head_dim_ckv": 512, "head_dim_kpe": 64, "page_size": PAGE, "sm_scale": 0.1}
        lists = {"indices": make.ints(*range(8), -1, 9).reshape(2, 5)}
        return lists | sizes | {"kv_data_type": e4m3} | types(make)

    def run(make: Make) -> Arguments:
        rows = {"q_nope": make.data(2, 16, 512), "q_pe": make.data(2, 16, 64)}
        return rows | {
            "ckv_cache": make.data(PAGES, PAGE, 512).to(e4m3),
            "kpe_cache": make.data(PAGES, PAGE, 64).to(e4m3),
            "ckv_scale_arr": make.ones(PAGES, PAGE, 4),
            "kpe_scale": 1.0,
        }

    def extras(make: Make) -> Arguments:
        lists = {"indices": make.ints(*range(9, -1, -1)).reshape(2, 5), "sinks": make.floats(16)}
        return lists | {"out": make.empty(2, 16, 512)}

    made = Step("flashpage.mla:BatchMLASparseAttentionWrapper", workspace)
    planned = Step(".plan", plan, lambda make: {"topk_length": torch.tensor([5, 5])})
    return Scene("BatchMLASparseAttentionWrapper", (made, planned, Step(".run", run, extras)))


def _two_caches() -> Scene:
    """Rows of DeepSeek V4, and a list of tokens in each of two caches for each row of q."""

    def plan(make: Make) -> Arguments:
        sizes = {"num_heads": 16, "head_dim_ckv": 512, "head_dim_kpe": 0, "page_size": PAGE, "sm_scale": 0.1}
        lists = {"indices": make.ints(*range(8), -1, 9).reshape(2, 5), "extra_indices": make.ints(3, -1).reshape(2, 1)}
        return lists | sizes | {"kv_row_format": "deepseek_v4"} | types(make)

    def run(make: Make) -> Arguments:
        caches = {name: make.data(PAGES, PAGE, 584).to(torch.uint8).zero_() for name in ("kv_cache", "extra_kv_cache")}
        return {"query": make.data(2, 16, 512)} | caches

    made = Step("flashpage.mla:BatchMLASparseAttentionWrapper", workspace)
    planned = Step(".plan", plan, lambda make: {"extra_topk_length": torch.tensor([1, 1])})
    extras = lambda make: {"extra_indices": make.ints(2, 1).reshape(2, 1), "sinks": make.floats(16)}
    return Scene("BatchMLASparseAttentionWrapper, two caches", (made, planned, Step(".run", run, extras)))


def scenes() -> list[Scene]:
    decode, prefill = "BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"
    return [
        *_paged(decode, "flashpage.decode", decode_plan, 2, "forward"),
        _graph_decode(),
        _fast_decode(),
        *_paged(prefill, "flashpage.prefill", prefill_plan, 5, "forward", dim="head_dim_qk"),
        *_ragged(),
        _sink(),
        _mixed(),
        _latent(),
        _selected(),
        _two_caches(),
    ]
