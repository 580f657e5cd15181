"""Scenes of ranks, integrations, plans without a run, and small helpers."""

from __future__ import annotations

import dataclasses

import torch

from ..scene import DIM, HEADS, KV_HEADS, PAGE, Arguments, Make, Scene, Step, function
from .arguments import heads, paged_run, run_extras, types, workspace


def _parallel() -> list[Scene]:
    def plan(make: Make) -> Arguments:
        lengths = {"kv_indptr": make.ints(0, 2, 3), "kv_indices": make.ints(5, 2, 7), "seq_lens": make.ints(19, 16)}
        return lengths | heads() | types(make)

    wrapper = (
        Step("flashpage.parallel:ContextParallelAttention", workspace),
        Step(".plan", plan, lambda make: {"qo_indptr": make.ints(0, 1, 2), "custom_mask": make.bits(35)}),
        Step(".run", paged_run(2), run_extras(2)),
    )
    merge = Step(
        "flashpage.parallel:merge_over_group",
        lambda make: {"out": make.data(2, HEADS, DIM), "lse": make.floats(2, HEADS)},
    )
    layout = Step("flashpage.parallel:ContextLayout", lambda make: {"rank": 0, "world_size": 2, "page_size": PAGE})
    share = lambda make: {"num_qo_heads": HEADS, "num_kv_heads": KV_HEADS, "rank": 0, "world_size": 2}
    lens = lambda make: {"seq_lens": make.ints(19, 16)}
    places = lambda make: {"positions": make.ints(1, 17), "seq_lens": make.ints(19, 19)}
    local = lambda make: {"kv_indptr": make.ints(0, 2, 3), "kv_indices": make.ints(5, 2, 7)} | lens(make)
    one = lambda name, *steps: Scene(name, steps, family="other", cuda=False)
    return [
        one("ContextParallelAttention", *wrapper),
        one("ContextParallelAttention.layout", wrapper[0], Step(".layout", lambda make: {"page_size": PAGE})),
        one("merge_over_group", merge),
        one("head_share", Step("flashpage.parallel:head_share", share)),
        one("ContextLayout", layout, Step(".tokens", lens)),
        one("ContextLayout.is_local", layout, Step(".is_local", places)),
        one("ContextLayout.tokens_before", layout, Step(".tokens_before", places)),
        one("ContextLayout.pages", layout, Step(".pages", local)),
    ]


def _others() -> list[Scene]:
    device = lambda make: {"device": torch.device(make.device)}
    numbers = lambda make: {"x": 5, "y": 3}
    one = lambda make: {"x": 5}
    lens = lambda make: {"q_lens": [2, 3], "kv_lens": [20, 30], "num_ctas": 16}
    tables = lambda make: {"table": make.ints(*range(64)).view(2, 32), "rows": make.ints(1, 0)}
    gather = lambda make: tables(make) | {"indptr": make.ints(0, 3, 5), "indices": make.ints(0, 0, 0, 0, 0)}
    pool_sizes = {"num_pages": 4, "page_size": PAGE, "num_layers": 1, "num_kv_heads": KV_HEADS, "head_dim": DIM}
    pool = Step("flashpage.integrations:TokenPool", lambda make: pool_sizes | {"dtype": make.dtype})
    table = Step("flashpage.integrations:RequestTable", lambda make: {"max_requests": 4, "max_context": 32})
    places = lambda make: {"rows": make.ints(0, 1), "positions": make.ints(3, 4), "slots": make.ints(17, 18)}
    new = lambda make: {"k": make.data(2, KV_HEADS, DIM), "v": make.data(2, KV_HEADS, DIM)}
    write = lambda make: {"layer": 0, "slots": make.ints(17, 18)} | new(make)
    scalars = lambda make: {"logit": "score + a", "scalars": {"a": 1.0}}
    found = [
        function("utils:ceil_div", numbers),
        function("utils:round_up", numbers),
        function("utils:next_positive_power_of_2", one),
        function("utils:last_positive_power_of_2", one),
        function("utils:is_float8", lambda make: {"x": make.data(3)}),
        function("utils:canonicalize_torch_dtype", lambda make: {"dtype": "float16"}),
        function("utils:get_alibi_slopes", lambda make: {"n_heads": HEADS}, device),
        function("utils:device_support_pdl", device),
        function("utils:is_sm90a_supported", device),
        function("utils:determine_attention_backend", device),
        function("variants:alibi_slopes", lambda make: {"num_heads": HEADS}),
        function("variants:Variant", scalars),
        function("plan:plan_lengths", lens, lambda make: {"window_left": 20, "head_dim_vo": DIM}),
        function("integrations:gather_slots", gather, lambda make: {"starts": make.ints(0, 0)}, results=("indices",)),
        function("integrations:tree_mask", lambda make: {"parents": [[-1, 0], [-1]], "seq_lens": [5, 4]}),
        function("integrations:batch_sizes_to_capture", lambda make: {"max_batch": 20}),
        Scene("TokenPool", (pool, Step(".write", write, lambda make: {"k_scale": 1.0, "v_scale": 1.0}))),
        Scene("TokenPool.kv", (pool, Step(".kv", lambda make: {"layer": 0}))),
        Scene("RequestTable", (table, Step(".write", places))),
        Scene(
            "RequestTable.release",
            (table, Step(".acquire", lambda make: {}), Step(".release", lambda make: {"row": 0})),
        ),
    ]
    return [dataclasses.replace(scene, family="other", cuda=False) for scene in found]


def scenes() -> list[Scene]:
    return [*_parallel(), *_others()]
