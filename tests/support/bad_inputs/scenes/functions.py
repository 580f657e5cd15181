"""Scenes of functions: FlashInfer's, flash-attn's, FlashMLA's and vLLM's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from flashpage.flash_mla import get_mla_metadata

from ..scene import DIM, HEADS, KV_HEADS, PAGE, PAGES, Arguments, Make, Scene, function
from .arguments import ragged_run


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
        function("decode:single_decode_with_kv_cache", single(0), scales),
        function("prefill:single_prefill_with_kv_cache", single(5), prefill),
        function("prefill:single_prefill_with_kv_cache_return_lse", single(5), prefill),
        function("cascade:merge_state", lambda make: state(make, "v_a", "s_a", "v_b", "s_b")),
        function(
            "cascade:merge_state_in_place",
            lambda make: state(make, "v", "s", "v_other", "s_other"),
            lambda make: {"mask": make.bits(3)},
            results=("v", "s"),
        ),
        function("cascade:merge_states", lambda make: state(make, "v", "s", states=2)),
        function("page:append_paged_kv_cache", append, results=("paged_kv_cache",)),
        function("page:nvfp4_quantize_append_paged_kv_cache", append_nvfp4, results=("paged_kv_cache",)),
        function(
            "page:nvfp4_quantize_append_paged_kv_cache_with_slot_mapping", append_slots, results=("paged_kv_cache",)
        ),
        function("page:append_paged_mla_kv_cache", append_mla, results=("ckv_cache", "kpe_cache")),
        function("page:get_batch_indices_positions", new_lens, indices),
        function("page:get_seq_lens", lens),
        function("quantization:packbits", lambda make: {"x": make.bits(11)}),
        function("quantization:segment_packbits", lambda make: {"x": make.bits(11), "indptr": make.ints(0, 5, 11)}),
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

    def metadata(make: Make) -> Arguments:
        return {"seqlens_k": make.ints(19, 16), "num_q_tokens_per_head_k": 16, "h_k": 1}

    def expanded(make: Make) -> Arguments:
        ends = {"cu_seqlens_qo": make.ints(0, 2, 5), "cu_seqlens_kv": make.ints(0, 20, 30)}
        return ragged_run(make) | ends | {"max_seqlen_qo": 3, "max_seqlen_kv": 20}

    found = [
        function("decode:trtllm_batch_decode_with_kv_cache_mla", latent, latent_lse),
        function("mla:xqa_batch_decode_with_kv_cache_mla", latent, latent_extras),
        function("flash_mla:flash_mla_with_kvcache", flash_mla),
        function("flash_mla:flash_mla_sparse_fwd", sparse, lambda make: {"topk_length": make.ints(3, 3)}),
        function("flash_mla:get_mla_decoding_metadata", metadata, lambda make: {"h_q": 16, "topk": 64}),
        dataclasses.replace(function("flash_mla:flash_attn_varlen_func", expanded), name="expanded_prompts"),
        function("decode:trtllm_batch_decode_with_kv_cache", decode, extras(2)),
        function("prefill:trtllm_batch_context_with_kv_cache", lambda make: context(make) | layout(make), extras(5)),
        function("flash_attn:flash_attn_varlen_func", varlen, slopes),
        function("flash_attn:flash_attn_with_kvcache", lambda make: with_cache(make) | of_pages(make), slopes),
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
        function("vllm_ops:paged_attention_v1", decode, slopes, results=("out",)),
        function("vllm_ops:paged_attention_v2", decode_v2, slopes, results=("out",)),
        function("vllm_ops:reshape_and_cache", write, results=written),
        function("vllm_ops:reshape_and_cache_flash", write_flash, results=written),
        function("vllm_ops:split_kv_cache", split),
    ]


def scenes() -> list[Scene]:
    return [*_functions(), *_calls(), *_vllm()]
