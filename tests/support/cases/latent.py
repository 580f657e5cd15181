"""Rows over latent rows (MLA): K is the whole row of a token, V its first columns, for all query heads."""

from __future__ import annotations

from typing import Any

from cases.case import MIXED_KV, MIXED_Q, TILE_EDGES, Case

_DEEPSEEK: dict[str, Any] = {"head_dim": 576, "head_dim_vo": 512, "num_kv_heads": 1, "entry": "latent"}


def latent_case(name: str, why: str, q_lens: tuple[int, ...], kv_lens: tuple[int, ...], **options: Any) -> Case:
    values = _DEEPSEEK | {"num_q_heads": 16, "sm_scale": 192**-0.5} | options
    return Case(f"latent-{name}", why, kv_lens, q_lens, **values)


def _fp8_rows() -> list[Case]:
    e4m3, batch = {"kv_dtype": "float8_e4m3fn"}, ((1, 3, 1), (130, 70, 0))
    fp16: dict[str, Any] = {"q_dtype": "float16", "page_size": 3, "head_dim": 320, "head_dim_vo": 256}
    v4: dict[str, Any] = {"head_dim": 512, "row_format": "deepseek_v4"}
    v32: dict[str, Any] = {"row_format": "deepseek_v32"}
    return [
        latent_case("fp8-numbers", "a scale of each part", *batch, row_format="numbers", causal=True, **e4m3),
        latent_case("fp8-tensors", "scales on the device", *batch, row_format="tensors", cache="gapped", **e4m3),
        latent_case("fp8-tokens", "scales of tokens", *batch, row_format="tokens", cache="interleaved", **e4m3),
        latent_case(
            *("fp8-one-scale", "a scale a token, a size of the general kernel", *batch),
            **e4m3 | {"row_format": "tokens", "head_dim": 192, "head_dim_vo": 128, "reduced": True},
        ),
        latent_case("fp8-tokens-64", "64 heads, scales of tokens", *batch, row_format="tokens", num_q_heads=64, **e4m3),
        latent_case(
            *("fp8-256-64", "40 heads, Mistral's rows, sinks", *batch),
            **e4m3 | fp16 | {"row_format": "tokens", "q_dtype": "bfloat16", "num_q_heads": 40, "sinks": True},
        ),
        latent_case(
            *("fp8-512-0", "128 heads, rows without a tail, fp32 outputs", *batch),
            **e4m3 | {"row_format": "tokens", "head_dim": 512, "num_q_heads": 128, "o_dtype": "float32"},
        ),
        latent_case("v32-fp16-64", "64 heads, fp16 queries", *batch, num_q_heads=64, q_dtype="float16", **v32),
        latent_case("fp8-three", "three scales", *batch, row_format="tokens", head_dim=448, head_dim_vo=384, **e4m3),
        latent_case("fp8-fp16", "Mistral's rows under fp16", *batch, row_format="tokens", **fp16, **e4m3),
        latent_case(
            "v32",
            "rows of 656 bytes",
            *batch,
            num_q_heads=40,
            causal=True,
            reduced=True,
            **v32,
        ),
        latent_case("v32-gapped", "with gaps", *batch, cache="gapped", sinks=True, **v32),
        latent_case("v32-page-1", "tokens one by one", *batch, row_format="deepseek_v32-uneven", page_size=1),
        latent_case("v32-fp16", "fp16 queries", *batch, q_dtype="float16", page_size=64, **v32),
        latent_case("v32-cut", "one long request", (1,), (3000,), row_format="deepseek_v32-uneven", num_q_heads=128),
        latent_case("v4", "rows of 584 bytes, scales after those of a page", *batch, reduced=True, **v4),
        latent_case("v4-page-64", "the same", *batch, page_size=64, num_q_heads=64, causal=True, **v4),
    ]


def _selected_rows() -> list[Case]:
    batch, v32 = ((1, 4, 0, 3), (130, 70, 3, 0)), {"row_format": "deepseek_v32"}
    columns: dict[str, Any] = {"num_q_heads": 40, "reduced": True}
    return [
        latent_case("selected", "lists with gaps", *batch, selected="padded", reduced=True),
        latent_case("selected-lengths", "lists of known lengths", *batch, selected="lengths", sinks=True, page_size=3),
        latent_case("selected-two", "two tensors", *batch, selected="padded", cache="gapped", **columns),
        latent_case("selected-cut", "one long list is cut", (1,), (5000,), selected="lengths", num_q_heads=128),
        latent_case("selected-split", "cut at multiples", *batch, selected="padded", fixed_split_size=32),
        latent_case("selected-v32", "rows of 656 bytes", *batch, selected="padded", outputs="no_lse", **v32),
        latent_case("selected-v32-page-64", "the same", *batch, selected="lengths", page_size=64, **v32),
        latent_case(
            *("selected-v4", "rows of 584 bytes", *batch),
            selected="padded",
            page_size=64,
            head_dim=512,
            row_format="deepseek_v4",
        ),
        latent_case(
            *("selected-v4-wide", "many heads, fp32 outputs", *batch),
            selected="padded",
            page_size=64,
            head_dim=512,
            row_format="deepseek_v4",
            num_q_heads=64,
            o_dtype="float32",
        ),
        *(
            latent_case(
                *(f"selected-v4-two-{heads}", "rows of 584 bytes in two caches", *batch),
                selected=selected,
                page_size=64,
                head_dim=512,
                row_format="deepseek_v4",
                num_q_heads=heads,
                second_page=16,
                sinks=heads > 16,
                reduced=heads == 128,
            )
            for heads, selected in ((16, "padded"), (64, "lengths"), (128, "padded"))
        ),
        latent_case("selected-prefill", "many rows", (90,), (120,), selected="lengths", mask_kind="past"),
    ]


def _flashinfer_rows() -> list[Case]:
    """Batches of FlashInfer's own tests of DeepSeek's MLA, the long ones shortened."""
    fp16: dict[str, Any] = {"q_dtype": "float16"}
    tokens: dict[str, Any] = {"kv_dtype": "float8_e4m3fn", "row_format": "tokens", "head_dim": 512}
    numbers: dict[str, Any] = {"kv_dtype": "float8_e4m3fn", "row_format": "numbers", "page_size": 64}
    varlen, lens = {"page_size": 1, **fp16}, (1, 79, 514, 11, 17, 114)
    return [
        latent_case("varlen", "five rows a request, which may have fewer tokens", (5,) * 6, lens, **varlen),
        latent_case("varlen-64", "64 heads, causal", (9,) * 3, (11, 33, 514), num_q_heads=64, causal=True, **varlen),
        latent_case("varlen-decode", "64 heads", (1,) * 6, (0, 33, 514, 3, 79, 743), num_q_heads=64, **varlen),
        latent_case("without-kpe", "fp16 rows without a tail", (3, 3), (97, 97), head_dim=512, **fp16),
        latent_case("many", "157 requests, pages of 32", (1,) * 157, (33,) * 157, page_size=32, **fp16),
        latent_case("rows-17", "17 rows a request", (17, 17), (197, 75), page_size=32, causal=True, **fp16),
        latent_case("page-128", "128 heads, pages of 128", (1, 1), (1024, 128), num_q_heads=128, page_size=128),
        latent_case("peaked", "one token has nearly all weight", (1, 1), (300, 128), num_q_heads=128, sm_scale=7.2),
        latent_case("fp8-without-kpe", "scales of tokens without a tail", (1, 1), (45, 29), **tokens),
        latent_case("fp8-16-rows", "128 heads, 16 rows", (16,), (256,), num_q_heads=128, causal=True, **numbers),
        latent_case("fp8-64-heads", "64 heads", (1, 1), (256, 256), num_q_heads=64, **numbers),
    ]


def _drawn_rows() -> list[Case]:
    """Rows of other sizes than one, as in FlashInfer's tests of fp8 rows: small scales, zeros, and a tail that decides
    which tokens have weight."""
    e4m3 = {"kv_dtype": "float8_e4m3fn"}
    numbers: dict[str, Any] = {"row_format": "numbers", "page_size": 64, "num_q_heads": 64, **e4m3}
    tensors, tokens = {"row_format": "tensors", **e4m3}, {"row_format": "tokens", **e4m3}
    v32: dict[str, Any] = {"row_format": "deepseek_v32"}
    v4: dict[str, Any] = {"row_format": "deepseek_v4", "head_dim": 512}
    small, listed = ((1, 2), (130, 70)), {"selected": "padded", "page_size": 64}
    faint, zeros, tail = (0.01, 0.01), (0.0, 0.0), (0.05, 4.0)
    return [
        latent_case(
            "fp8-faint", "the whole range of e4m3 times 2^-12", *small, deviations=faint, sm_scale=7.2, **numbers
        ),
        latent_case("fp8-faint-ckv", "a tail that decides the scores", *small, deviations=(0.01, 1.0), **numbers),
        latent_case("fp8-faint-kpe", "a faint tail", *small, deviations=(1.0, 0.01), **tensors),
        latent_case("fp8-decades", "scales of 0.01 to 1", *small, **tokens | {"row_format": "tokens-decades"}),
        latent_case("v32-decades", "scales of 0.01 to 1", *small, row_format="deepseek_v32-decades"),
        latent_case(
            "v32-range",
            "the same, and the whole range",
            *small,
            row_format="deepseek_v32-decades",
            deviations=(1.0, 1.0),
        ),
        latent_case("v4-decades", "scales of 2^-7 to 1", *small, **v4 | {"row_format": "deepseek_v4-decades"}),
        latent_case(
            "fp8-zeros", "128 heads, rows of zeros", *small, deviations=zeros, **numbers | {"num_q_heads": 128}
        ),
        latent_case("fp8-zeros-tokens", "rows of zeros, scales of tokens", *small, deviations=zeros, **tokens),
        latent_case("v32-zeros", "rows of zeros", *small, deviations=zeros, **v32),
        latent_case("v4-zeros", "rows of zeros", *small, deviations=zeros, **v4),
        latent_case("selected-zeros", "lists of rows of zeros", *small, deviations=zeros, **v32, **listed),
        latent_case("tail", "the tail decides the scores", *small, deviations=tail),
        latent_case("fp8-tail", "the tail decides the scores", *small, deviations=tail, **numbers),
        latent_case("fp8-tail-tokens", "16 heads, scales of tokens", *small, deviations=tail, **tokens),
        latent_case("v32-tail", "a tail in bf16", *small, deviations=tail, **v32),
        latent_case("selected-tail", "a tail in bf16", *small, deviations=tail, **v32, **listed),
    ]


def rows() -> list[Case]:
    edges, ones = TILE_EDGES, (1,) * len(TILE_EDGES)
    return [
        latent_case("edges", "decode at every tile edge", ones, edges),
        latent_case("edges-split", "q and the cache as two tensors", ones, edges, q_strides="split", cache="tuple"),
        latent_case("packed", "q and the cache in one tensor each", ones, edges, cache="interleaved", page_size=64),
        latent_case("gapped", "gaps between rows and pages", (1, 2), (77, 33), cache="gapped", outputs="strided"),
        latent_case(
            "page-1", "pages of one token", (1, 1, 1), (200, 0, 3), page_size=1, cache="interleaved", reduced=True
        ),
        latent_case("page-3", "pages of an odd size", (1, 4), (100, 65), page_size=3, causal=True),
        latent_case("mtp", "two rows a request, causal", (2, 2, 2), (64, 1, 129), causal=True),
        latent_case("mixed", "decode rows and prompts in one batch", MIXED_Q, MIXED_KV, causal=True, num_q_heads=8),
        latent_case("empty", "requests without tokens or rows", (1, 0, 3), (0, 40, 0)),
        latent_case("long", "one long request is cut", (1, 1), (6000, 5), num_q_heads=32),
        latent_case(
            "invariant", "cut at multiples of fixed_split_size", (1, 1), (700, 50), fixed_split_size=8, reduced=True
        ),
        latent_case("uncut", "disable_split_kv", (1,), (3000,), disable_split_kv=True),
        latent_case("sinks", "sinks join the denominator", (1, 2), (50, 0), sinks=True, outputs="returned"),
        latent_case("no-lse", "no LSE is written", (1, 3), (20, 70), outputs="no_lse"),
        *(
            latent_case(f"heads-{heads}", "any number of heads", (1, 2), (90, 130), num_q_heads=heads, causal=True)
            for heads in (1, 20, 24, 40, 96, 128)
        ),
        latent_case("wide-edges", "128 heads at every tile edge", ones, edges, num_q_heads=128, page_size=64),
        latent_case("wide-mtp", "64 heads, causal", (2, 1, 3), (64, 1, 200), causal=True, num_q_heads=64, page_size=8),
        latent_case(
            "wide-rows",
            "64 heads, pages of one token",
            (1, 2),
            (200, 77),
            num_q_heads=64,
            page_size=1,
            reduced=True,
        ),
        latent_case("wide-equal", "tiles side by side", (2, 2), (400, 65), causal=True, num_q_heads=128, page_size=64),
        latent_case("wide-little", "a short request by units of few rows", (1,), (300,), num_q_heads=96, page_size=64),
        latent_case(
            "wide-sinks",
            "pairs, one is cut",
            (1, 1),
            (400, 0),
            num_q_heads=128,
            sinks=True,
            reduced=True,
        ),
        latent_case(
            "columns",
            "64 heads, one is cut",
            (1,) * 3,
            (400, 0, 65),
            num_q_heads=64,
            sinks=True,
            reduced=True,
        ),
        latent_case("fp16", "fp16", (1, 2), (90, 130), q_dtype="float16"),
        latent_case("fp32", "fp32, on the CPU", (1, 2), (90, 130), q_dtype="float32"),
        latent_case("out-fp32", "another type of the output", (1, 2), (90, 130), o_dtype="float32", reduced=True),
        latent_case("out-fp32-wide", "a cut unit", (2, 1), (3000, 90), num_q_heads=128, o_dtype="float32"),
        latent_case("256-64", "Mistral's rows", (1, 5), (90, 130), head_dim=320, head_dim_vo=256, causal=True),
        latent_case("512-0", "rows without a tail (Kimi K3)", (1, 5), (90, 130), head_dim=512, causal=True),
        *_fp8_rows(),
        *_selected_rows(),
        *_flashinfer_rows(),
        *_drawn_rows(),
        latent_case("512-0-packed", "the same in one tensor", (1, 5), (90, 130), head_dim=512, cache="interleaved"),
    ]
