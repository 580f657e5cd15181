"""Scenes of cascades, POD and block-sparse masks."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..scene import DIM, HEADS, KV_HEADS, Arguments, Make, Scene, Step
from .arguments import decode_plan, heads, paged_run, pages, ragged_run, run_extras, types, workspace, workspaces


def _cascade() -> list[Scene]:
    def plan(make: Make) -> Arguments:
        levels = {
            "qo_indptr_arr": [make.ints(0, 2), make.ints(0, 1, 2)],
            "paged_kv_indptr_arr": [make.ints(0, 1), make.ints(0, 1, 2)],
            "paged_kv_indices_arr": [make.ints(1), make.ints(5, 2)],
            "paged_kv_last_page_len": [make.ints(16), make.ints(3, 7)],
        }
        return levels | heads() | types(make)

    def unique(make: Make) -> Arguments:
        return pages(make, "unique_kv_") | heads() | {"data_type": make.dtype}

    def shared(rows: int) -> Callable[[Make], Arguments]:
        def make_them(make: Make) -> Arguments:
            k, v = make.data(9, KV_HEADS, DIM), make.data(9, KV_HEADS, DIM)
            return {"q": make.data(rows, HEADS, DIM), "k_shared": k, "v_shared": v, "unique_kv_cache": make.cache()}

        return make_them

    def prefill(make: Make) -> Arguments:
        return {"qo_indptr": make.ints(0, 2, 5)} | pages(make, "paged_kv_") | heads()

    many, one, other = (
        "MultiLevelCascadeAttentionWrapper",
        "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
        "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
    )
    made = Step(f"flashpage.cascade:{many}", lambda make: {"num_levels": 2} | workspace(make))
    planned, ran = Step(".plan", plan), Step(".run", paged_run(2), run_extras(2))

    def reset(make: Make) -> Arguments:
        return workspace(make) | {"int_workspace_buffers": [make.workspace(), make.workspace()]}

    decode = (Step(f"flashpage.cascade:{one}", workspace), Step(".begin_forward", unique), Step(".forward", shared(2)))
    rows = (Step(f"flashpage.cascade:{other}", workspace), Step(".begin_forward", prefill), Step(".forward", shared(5)))
    resets = Step(".reset_workspace_buffer", workspaces)
    return [
        Scene(many, (made, planned, ran), family="composed"),
        Scene(f"{many}.reset", (made, Step(".reset_workspace_buffer", reset), planned, ran), family="composed"),
        Scene(one, decode, family="composed"),
        Scene(f"{one}.reset", (decode[0], resets, *decode[1:]), family="composed"),
        Scene(other, rows, family="composed", cuda=False),  # takes fp16 alone
        Scene(f"{other}.reset", (rows[0], resets, *rows[1:]), family="composed", cuda=False),
    ]


def _pod() -> list[Scene]:
    def plan(make: Make) -> Arguments:
        first = dict(zip(("kv_indptr_p", "kv_indices_p", "last_page_len_p"), pages(make).values(), strict=True))
        second = dict(zip(("kv_indptr_d", "kv_indices_d", "last_page_len_d"), pages(make).values(), strict=True))
        rows = {"qo_indptr_p": make.ints(0, 2, 5), "qo_indptr_d": make.ints(0, 1, 2)}
        return {"qo_indptr_p": rows["qo_indptr_p"]} | first | rows | second | heads() | types(make)

    def run(make: Make) -> Arguments:
        caches = {"paged_kv_cache_p": make.cache(), "paged_kv_cache_d": make.cache()}
        return {"q_p": make.data(5, HEADS, DIM), "q_d": make.data(2, HEADS, DIM)} | caches

    def run_one(make: Make) -> Arguments:
        ragged = ragged_run(make)
        first = {f"{name}_p": tensor for name, tensor in ragged.items()}
        return first | {"q_d": make.data(2, HEADS, DIM), "paged_kv_cache_d": make.cache()}

    masks = lambda values: lambda make: {"custom_mask_p": make.bits(values)}
    batch, one = "BatchPODWithPagedKVCacheWrapper", "PODWithPagedKVCacheWrapper"
    single = (
        Step(f"flashpage.pod:{one}", workspace),
        Step(".plan", decode_plan),
        Step(".run", run_one, masks(150)),
    )
    many = (Step(f"flashpage.pod:{batch}", workspace), Step(".plan", plan), Step(".run", run, masks(86)))
    return [
        Scene(batch, many, family="composed"),
        Scene(one, single, family="composed"),
        Scene(
            f"{one}.reset",
            (single[0], Step(".reset_workspace_buffer", workspaces), *single[1:]),
            family="composed",
        ),
    ]


def _sparse() -> list[Scene]:
    def plan(make: Make) -> Arguments:
        blocks = {"indptr": make.ints(0, 1, 3), "indices": make.ints(1, 0, 2)}
        sizes = {"M": 8, "N": 12, "R": 4, "C": 4} | heads(page=False)
        return blocks | sizes | types(make) | {"o_data_type": make.dtype}

    def plan_variable(make: Make) -> Arguments:
        rows, columns = make.ints(4, 4).expand(KV_HEADS, 2), make.ints(4, 4, 4).expand(KV_HEADS, 3)
        blocks = {"block_mask_map": make.bits(KV_HEADS, 2, 3), "block_row_sz": rows.clone()}
        return blocks | {"block_col_sz": columns.clone()} | heads(page=False) | types(make)

    def run(make: Make) -> Arguments:
        k, v = make.data(12, KV_HEADS, DIM), make.data(12, KV_HEADS, DIM)
        return {"q": make.data(8, HEADS, DIM), "k": k, "v": v}

    def run_variable(make: Make) -> Arguments:
        return {name: tensor.transpose(0, 1).contiguous() for name, tensor in run(make).items()}

    def extras(make: Make) -> Arguments:
        scales = {"scale_q": make.ones(1), "scale_k": make.ones(1), "scale_v": make.ones(1)}
        return {"out": make.empty(8, HEADS, DIM), "lse": make.empty(8, HEADS, dtype=torch.float32)} | scales

    def extras_variable(make: Make) -> Arguments:
        return {"out": make.empty(HEADS, 8, DIM), "lse": make.empty(HEADS, 8, dtype=torch.float32)}

    found = []
    for name, planned, ran, more in (
        ("BlockSparseAttentionWrapper", Step(".plan", plan, lambda m: {"mask": m.bits(3, 4, 4)}), run, extras),
        ("VariableBlockSparseAttentionWrapper", Step(".plan", plan_variable), run_variable, extras_variable),
    ):
        made = Step(f"flashpage.sparse:{name}", workspace)
        reset = Step(".reset_workspace_buffer", workspaces)
        last = Step(".run", ran, more)
        for way, steps in (
            ("", (made, planned, last)),
            (".forward", (made, planned, Step(".forward", ran))),
            (".reset", (made, reset, planned, last)),
        ):
            found.append(Scene(name + way, steps, family="composed"))
    return found


def scenes() -> list[Scene]:
    return [*_cascade(), *_pod(), *_sparse()]
