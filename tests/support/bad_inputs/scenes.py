"""Calls of every public function with good arguments. A scene is a list of calls; the last one gives the result."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from flashpage.flash_mla import get_mla_metadata

PAGES, PAGE, HEADS, KV_HEADS, DIM = 8, 16, 4, 2, 64

Arguments = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Step:
    """One call of a function ("flashpage.page:get_seq_lens"), or of a method (".plan") of the object that the scene's
    first step returned."""

    target: str
    needed: Callable[[Make], Arguments]  # the good arguments
    optional: Callable[[Make], Arguments] = lambda make: {}  # good values of further arguments
    on_object: bool = False  # the function takes the object as its first argument

    @property
    def name(self) -> str:
        return self.target.rsplit(":", 1)[-1].lstrip(".")

    def function(self, found: Any) -> Any:
        """The function to call; `found` is the first step's object or its class."""
        if self.target.startswith("."):
            return getattr(found, self.target[1:])
        module, name = self.target.split(":")
        function = getattr(importlib.import_module(module), name)
        return functools.partial(function, found) if self.on_object else function


@dataclasses.dataclass(frozen=True)
class Scene:
    name: str
    steps: tuple[Step, ...]
    results: tuple[str, ...] = ()  # arguments that the last call writes, if it returns nothing
    family: str = "attention"
    cuda: bool = True  # False: runs on the CPU alone

    def run(self, given: list[Arguments], found: Any = None, first: int = 0) -> tuple[Any, Any]:
        """Runs the steps from `first` on; returns the object and the last result."""
        result = None
        for i in range(first, len(self.steps)):
            result = self.steps[i].function(found)(**given[i])
            if i == 0 and len(self.steps) > 1:
                found = result
        if self.results:
            result = [given[-1][name] for name in self.results]
        return found, result


class Make:
    """Makes good tensors on a device; equal calls give equal tensors."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.dtype = torch.float32 if device == "cpu" else torch.float16

    def ints(self, *values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def data(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        generator = torch.Generator().manual_seed(sum(shape))
        return torch.randn(shape, generator=generator, device="cpu").to(self.device, dtype or self.dtype)

    def floats(self, *shape: int) -> torch.Tensor:
        return self.data(*shape, dtype=torch.float32)

    def ones(self, *shape: int) -> torch.Tensor:
        return torch.ones(shape, dtype=torch.float32, device=self.device)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype or self.dtype, device=self.device)

    def bits(self, *shape: int) -> torch.Tensor:
        return torch.ones(shape, dtype=torch.bool, device=self.device)

    def workspace(self, size: int = 1 << 20) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def cache(self) -> torch.Tensor:
        return self.data(PAGES, 2, PAGE, KV_HEADS, DIM)


# ---------------------------------------------------------------- wrappers


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


def _paged(
    name: str, module: str, plan: Callable[[Make], Arguments], rows: int, *forward: str, dim: str = "head_dim"
) -> list[Scene]:
    """Scenes for each method of a paged wrapper."""
    made = Step(f"{module}:{name}", workspace, capacity)
    planned = Step(".plan", plan, lambda make: plan_extras(make) | (mask_extras(make) if rows > 2 else {}))
    ran = Step(".run", paged_run(rows), run_extras(rows))
    sizes = {"sizes": Step(".workspace_size", plan, plan_extras)} if rows == 2 else {}

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
        }

    def extras(make: Make) -> Arguments:
        scales = {"ckv_scale_arr": make.ones(PAGES, PAGE, 4), "kpe_scale": 0.5, "sinks": make.floats(16)}
        return scales | {"out": make.empty(2, 16, 512), "indices": make.ints(*range(9, -1, -1)).reshape(2, 5)}

    made = Step("flashpage.mla:BatchMLASparseAttentionWrapper", workspace)
    planned = Step(".plan", plan, lambda make: {"topk_length": torch.tensor([5, 5])})
    return Scene("BatchMLASparseAttentionWrapper", (made, planned, Step(".run", run, extras)))


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


# ---------------------------------------------------------------- functions


def _function(
    target: str,
    needed: Callable[[Make], Arguments],
    optional: Callable[[Make], Arguments] = lambda make: {},
    **more: Any,
) -> Scene:
    more = {"family": "functions"} | more
    return Scene(target.split(":")[1], (Step(f"flashpage.{target}", needed, optional),), **more)


def _functions() -> list[Scene]:
    def state(make: Make, *names: str, states: int = 0) -> Arguments:
        shape = (3, states, HEADS) if states else (3, HEADS)
        values = (make.data(*shape, DIM), make.floats(*shape)) * (len(names) // 2)
        return {name: value.clone() for name, value in zip(names, values, strict=True)}

    def single(rows: int) -> Callable[[Make], Arguments]:
        def make_them(make: Make) -> Arguments:
            q = make.data(*((rows,) if rows else ()), HEADS, DIM)
            return {"q": q, "k": make.data(9, KV_HEADS, DIM), "v": make.data(9, KV_HEADS, DIM)}

        return make_them

    def append(make: Make) -> Arguments:
        new = make.data(2, KV_HEADS, DIM)
        places = {"batch_indices": make.ints(0, 1), "positions": make.ints(17, 3), "paged_kv_cache": make.cache()}
        lengths = {"kv_indices": make.ints(5, 2, 7), "kv_indptr": make.ints(0, 2, 3)}
        return (
            {"append_key": new, "append_value": new.clone()} | places | lengths | {"kv_last_page_len": make.ints(2, 4)}
        )

    def append_mla(make: Make) -> Arguments:
        given = append(make)
        new = {"append_ckv": make.data(2, 64), "append_kpe": make.data(2, 32)}
        caches = {"ckv_cache": make.data(PAGES, PAGE, 64), "kpe_cache": make.data(PAGES, PAGE, 32)}
        del given["append_key"], given["append_value"], given["paged_kv_cache"]
        return new | caches | given

    def append_nvfp4(make: Make) -> Arguments:
        cache, scales = make.empty(PAGES, PAGE, KV_HEADS, DIM // 2, dtype=torch.uint8), torch.float8_e4m3fn
        shape = (PAGES, PAGE, KV_HEADS, DIM // 16)
        halves = {"paged_kv_cache": (cache, cache.clone())}
        halves |= {"kv_cache_sf": (make.empty(*shape, dtype=scales), make.empty(*shape, dtype=scales))}
        return append(make) | halves | {"k_scale": make.ones(1), "v_scale": make.ones(1)}

    def append_slots(make: Make) -> Arguments:
        given = append_nvfp4(make) | {"slot_mapping": make.ints(35, 3)}
        lists = ("batch_indices", "positions", "kv_indices", "kv_indptr", "kv_last_page_len")
        return {name: value for name, value in given.items() if name not in lists}

    new_lens = lambda make: {"append_indptr": make.ints(0, 1, 3), "seq_lens": make.ints(18, 4), "nnz": 3}
    indices = lambda make: {"batch_indices": make.ints(0, 0, 0), "positions": make.ints(0, 0, 0)}
    scales = lambda make: {"q_scale": make.ones(1), "k_scale": make.ones(1), "v_scale": make.ones(1)}
    old_scales = lambda make: {"scale_q": make.ones(1), "scale_k": make.ones(1), "scale_v": make.ones(1)}
    masks = lambda make: {"custom_mask": make.bits(5, 9), "packed_custom_mask": make.empty(6, dtype=torch.uint8)}
    prefill = lambda make: old_scales(make) | masks(make)
    lens = lambda make: {"kv_indptr": make.ints(0, 2, 3), "kv_last_page_len": make.ints(3, 16), "page_size": PAGE}
    return [
        _function("decode:single_decode_with_kv_cache", single(0), scales),
        _function("prefill:single_prefill_with_kv_cache", single(5), prefill),
        _function("prefill:single_prefill_with_kv_cache_return_lse", single(5), prefill),
        _function("cascade:merge_state", lambda make: state(make, "v_a", "s_a", "v_b", "s_b")),
        _function(
            "cascade:merge_state_in_place",
            lambda make: state(make, "v", "s", "v_other", "s_other"),
            lambda make: {"mask": make.bits(3)},
            results=("v", "s"),
        ),
        _function("cascade:merge_states", lambda make: state(make, "v", "s", states=2)),
        _function("page:append_paged_kv_cache", append, results=("paged_kv_cache",)),
        _function("page:nvfp4_quantize_append_paged_kv_cache", append_nvfp4, results=("paged_kv_cache",)),
        _function(
            "page:nvfp4_quantize_append_paged_kv_cache_with_slot_mapping", append_slots, results=("paged_kv_cache",)
        ),
        _function("page:append_paged_mla_kv_cache", append_mla, results=("ckv_cache", "kpe_cache")),
        _function("page:get_batch_indices_positions", new_lens, indices),
        _function("page:get_seq_lens", lens),
        _function("quantization:packbits", lambda make: {"x": make.bits(11)}),
        _function("quantization:segment_packbits", lambda make: {"x": make.bits(11), "indptr": make.ints(0, 5, 11)}),
    ]


def _calls() -> list[Scene]:
    """Functions that plan on the device and run, and flash-attn's."""

    def paged(rows: int, make: Make) -> Arguments:
        given = {"query": make.data(rows, HEADS, DIM), "kv_cache": make.cache(), "workspace_buffer": make.workspace()}
        return given | {"block_tables": make.ints(5, 2, 7, 0).view(2, 2), "seq_lens": make.ints(19, 16)}

    def context(make: Make) -> Arguments:
        lengths = {"batch_size": 2, "cum_seq_lens_q": make.ints(0, 2, 5), "cum_seq_lens_kv": None}
        return paged(5, make) | lengths | {"max_q_len": 3, "max_kv_len": 19, "bmm1_scale": 0.125, "bmm2_scale": 1.0}

    def extras(rows: int) -> Callable[[Make], Arguments]:
        def make_them(make: Make) -> Arguments:
            outputs = {"out": make.empty(rows, HEADS, DIM), "lse": make.empty(rows, HEADS, dtype=torch.float32)}
            return outputs | {"sinks": make.floats(HEADS), "window_left": 20, "kv_layout": "NHD"}

        return make_them

    def varlen(make: Make) -> Arguments:
        ends = {"cu_seqlens_q": make.ints(0, 2, 5), "cu_seqlens_k": make.ints(0, 20, 30)}
        return ragged_run(make) | ends | {"max_seqlen_q": 3, "max_seqlen_k": 20}

    def with_cache(make: Make) -> Arguments:
        k, v = (make.data(PAGES, PAGE, KV_HEADS, DIM) for _ in range(2))
        return {"q": make.data(2, 1, HEADS, DIM), "k_cache": k, "v_cache": v}

    def of_pages(make: Make) -> Arguments:
        return {"cache_seqlens": make.ints(19, 16), "block_table": make.ints(5, 2, 7, 0).view(2, 2)}

    slopes = lambda make: {"alibi_slopes": make.floats(HEADS)}
    layout = lambda make: {"kv_layout": "NHD"}
    decode = lambda make: paged(2, make) | {"max_seq_len": 19} | layout(make)
    lists = lambda make: {"block_tables": make.ints(5, 2, 7, 0).view(2, 2), "seq_lens": make.ints(19, 16)}

    def latent(make: Make) -> Arguments:
        given = {"query": make.data(2, 1, 16, 576), "kv_cache": make.data(PAGES, PAGE, 576)}
        sizes = {"qk_nope_head_dim": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "max_seq_len": 19}
        return given | {"workspace_buffer": make.workspace()} | sizes | lists(make)

    def latent_extras(make: Make) -> Arguments:
        scales = {"bmm1_scale": 0.1, "bmm2_scale": 1.0, "sinks": make.floats(16)}
        return {"out": make.empty(2, 1, 16, 512)} | scales

    latent_lse = lambda make: latent_extras(make) | {"lse": make.empty(2, 16, dtype=torch.float32)}

    def flash_mla(make: Make) -> Arguments:
        given = {"q": make.data(2, 1, 16, 576), "k_cache": make.data(PAGES, PAGE, 1, 576), "head_dim_v": 512}
        return given | of_pages(make) | {"tile_scheduler_metadata": get_mla_metadata()[0]}

    def sparse(make: Make) -> Arguments:
        given = {"q": make.data(2, 16, 576), "kv": make.data(40, 1, 576), "sm_scale": 0.1}
        return given | {"indices": make.ints(5, 2, 7, 0, 1, 39).view(2, 1, 3)}

    found = [
        _function("decode:trtllm_batch_decode_with_kv_cache_mla", latent, latent_lse),
        _function("mla:xqa_batch_decode_with_kv_cache_mla", latent, latent_extras),
        _function("flash_mla:flash_mla_with_kvcache", flash_mla),
        _function("flash_mla:flash_mla_sparse_fwd", sparse, lambda make: {"topk_length": make.ints(3, 3)}),
        _function("decode:trtllm_batch_decode_with_kv_cache", decode, extras(2)),
        _function("prefill:trtllm_batch_context_with_kv_cache", lambda make: context(make) | layout(make), extras(5)),
        _function("flash_attn:flash_attn_varlen_func", varlen, slopes),
        _function("flash_attn:flash_attn_with_kvcache", lambda make: with_cache(make) | of_pages(make), slopes),
    ]
    return [dataclasses.replace(scene, family="calls") for scene in found]


def _vllm() -> list[Scene]:
    def caches(make: Make) -> Arguments:
        key = make.data(PAGES, KV_HEADS, DIM // 8, PAGE, 8, dtype=torch.float16)
        return {"key_cache": key, "value_cache": make.data(PAGES, KV_HEADS, DIM, PAGE, dtype=torch.float16)}

    def decode(make: Make) -> Arguments:
        rows = {
            "out": make.empty(2, HEADS, DIM, dtype=torch.float16),
            "query": make.data(2, HEADS, DIM, dtype=torch.float16),
        }
        sizes = {"num_kv_heads": KV_HEADS, "scale": 0.125, "block_tables": make.ints(5, 2, 7, 0).view(2, 2)}
        lengths = {"seq_lens": make.ints(19, 16), "block_size": PAGE, "max_seq_len": 19, "alibi_slopes": None}
        return rows | caches(make) | sizes | lengths | types(make)

    def types(make: Make) -> Arguments:
        return {"kv_cache_dtype": "auto", "k_scale": make.ones(1), "v_scale": make.ones(1)}

    def fp8(make: Make, **shapes: tuple[int, ...]) -> Arguments:
        """Caches that are read and written with their scales."""
        return {name: make.empty(*shape, dtype=torch.uint8) for name, shape in shapes.items()} | {
            "kv_cache_dtype": "fp8"
        }

    def decode_v2(make: Make) -> Arguments:
        sums = {name: make.empty(2, HEADS, 1, dtype=torch.float32) for name in ("exp_sums", "max_logits")}
        return sums | {"tmp_out": make.empty(2, HEADS, 1, DIM, dtype=torch.float16)} | decode(make)

    def write(make: Make) -> Arguments:
        new = {name: make.data(2, KV_HEADS, DIM, dtype=torch.float16) for name in ("key", "value")}
        slots, heads = {"slot_mapping": make.ints(17, 3, dtype=torch.int64)}, (PAGES, KV_HEADS)
        shapes = {"key_cache": (*heads, DIM // 16, PAGE, 16), "value_cache": (*heads, DIM, PAGE)}
        return new | slots | types(make) | fp8(make, **shapes)

    def write_flash(make: Make) -> Arguments:
        rows = (PAGES, PAGE, KV_HEADS, DIM)
        return write(make) | fp8(make, key_cache=rows, value_cache=rows)

    slopes = lambda make: {"alibi_slopes": make.ones(HEADS)}
    split = lambda make: {
        "kv_cache": make.data(2, PAGES, PAGE * KV_HEADS * DIM),
        "num_kv_heads": KV_HEADS,
        "head_size": DIM,
    }
    written = ("key_cache", "value_cache")
    return [
        _function("vllm_ops:paged_attention_v1", decode, slopes, results=("out",)),
        _function("vllm_ops:paged_attention_v2", decode_v2, slopes, results=("out",)),
        _function("vllm_ops:reshape_and_cache", write, results=written),
        _function("vllm_ops:reshape_and_cache_flash", write_flash, results=written),
        _function("vllm_ops:split_kv_cache", split),
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
        _function("utils:ceil_div", numbers),
        _function("utils:round_up", numbers),
        _function("utils:next_positive_power_of_2", one),
        _function("utils:last_positive_power_of_2", one),
        _function("utils:is_float8", lambda make: {"x": make.data(3)}),
        _function("utils:canonicalize_torch_dtype", lambda make: {"dtype": "float16"}),
        _function("utils:get_alibi_slopes", lambda make: {"n_heads": HEADS}, device),
        _function("utils:device_support_pdl", device),
        _function("utils:is_sm90a_supported", device),
        _function("utils:determine_attention_backend", device),
        _function("variants:alibi_slopes", lambda make: {"num_heads": HEADS}),
        _function("variants:Variant", scalars),
        _function("plan:plan_lengths", lens, lambda make: {"window_left": 20, "head_dim_vo": DIM}),
        _function("integrations:gather_slots", gather, lambda make: {"starts": make.ints(0, 0)}, results=("indices",)),
        _function("integrations:tree_mask", lambda make: {"parents": [[-1, 0], [-1]], "seq_lens": [5, 4]}),
        _function("integrations:batch_sizes_to_capture", lambda make: {"max_batch": 20}),
        Scene("TokenPool", (pool, Step(".write", write, lambda make: {"k_scale": 1.0, "v_scale": 1.0}))),
        Scene("TokenPool.kv", (pool, Step(".kv", lambda make: {"layer": 0}))),
        Scene("RequestTable", (table, Step(".write", places))),
        Scene(
            "RequestTable.release",
            (table, Step(".acquire", lambda make: {}), Step(".release", lambda make: {"row": 0})),
        ),
    ]
    return [dataclasses.replace(scene, family="other", cuda=False) for scene in found]


@functools.cache
def scenes() -> dict[str, Scene]:
    decode, prefill = "BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"
    found = [
        *_paged(decode, "flashpage.decode", decode_plan, 2, "forward"),
        _graph_decode(),
        _fast_decode(),
        *_paged(prefill, "flashpage.prefill", prefill_plan, 5, "forward", dim="head_dim_qk"),
        *_ragged(),
        _sink(),
        _mixed(),
        _latent(),
        _selected(),
        *_cascade(),
        *_pod(),
        *_sparse(),
        *_parallel(),
        *_functions(),
        *_calls(),
        *_vllm(),
        *_others(),
    ]
    return {scene.name: scene for scene in found}
