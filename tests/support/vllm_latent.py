"""Checks of flashpage's classes for vLLM's layers with latent rows, without a model, where vLLM can be imported."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from reference import Options, attention
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from flashpage.engines.plugin.group_plans import GroupSizes
from flashpage.engines.plugin.latent_plans import LatentPlans
from flashpage.engines.plugin.layers import LayerOptions
from flashpage.engines.vllm.plugin import latent, register
from flashpage.engines.vllm.plugin.latent_prefill import FlashpagePrefill
from flashpage.engines.vllm.plugin.latent_write import write
from flashpage.engines.vllm.plugin.planner import GroupPlanner

HEADS, CKV, KPE, PAGE, SCALE = 4, 64, 32, 16, 0.2
USUAL: dict[str, Any] = {
    "head_size": 576,
    "dtype": torch.bfloat16,
    "kv_cache_dtype": "auto",
    "block_size": 64,
    "use_mla": True,
    "has_sink": False,
    "use_sparse": False,
    "use_mm_prefix": False,
    "use_per_head_quant_scales": False,
    "device_capability": DeviceCapability(9, 0),
    "attn_type": "decoder",
}
TURING = DeviceCapability(7, 5)


def indptr(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def check_decodes(
    rows: list[int], lengths: list[int], graph_requests: int = 0, dtype: torch.dtype = torch.float32
) -> None:
    """Decodes, and drafts that are verified; rows are written by slots, of which -1 are padding. Rows of e4m3 have a
    scale."""
    torch.manual_seed(0)
    pages = [-(-n // PAGE) for n in lengths]
    tables = torch.zeros(len(rows), max(pages), dtype=torch.int32)
    order = torch.randperm(sum(pages)).int()
    cache = torch.full((len(order), PAGE, CKV + KPE), math.nan).to(dtype)
    tokens = [torch.randn(n, 1, CKV + KPE) for n in lengths]
    scale = None if dtype is torch.float32 else 0.5
    kind, factor = ("auto", None) if scale is None else ("fp8", torch.tensor(scale))
    for i, (mine, count) in enumerate(zip(tokens, pages, strict=True)):
        tables[i, :count] = order[sum(pages[:i]) :][:count]
        at = torch.arange(len(mine))
        slots = torch.cat([tables[i, at // PAGE] * PAGE + at % PAGE, torch.tensor([-1])]).long()
        new = torch.cat([mine[:, 0], torch.full((1, CKV + KPE), math.nan)])
        write(new[:, :CKV], new[:, CKV:], cache, slots, kind, factor)
    sizes = GroupSizes(PAGE, torch.float32, dtype, 8, 64, 256, max(rows), graph_requests, has_exact_lengths=False)
    options = LayerOptions((HEADS, 1, CKV + KPE), SCALE)
    plans = LatentPlans(CKV, [options], sizes, torch.device("cpu"))
    builder: Any = latent.FlashpageMLABuilder.__new__(latent.FlashpageMLABuilder)
    builder._planner = GroupPlanner(plans)
    impl: Any = SimpleNamespace(kv_lora_rank=CKV, options=options, _is_fp8=scale is not None)
    layer = SimpleNamespace(_k_scale_float=scale)
    if scale is not None:
        tokens = [(mine / scale).to(dtype).float() * scale for mine in tokens]
    q = torch.randn(sum(rows), HEADS, CKV + KPE)
    starts = indptr(rows)
    for longest in (None, max(rows)):  # vLLM 0.26 names no longest one
        given = (tables, torch.tensor(lengths, dtype=torch.int32), max(lengths), starts, starts, sum(rows), None)
        decode = builder._build_decode(*given, **({} if longest is None else {"max_query_len": longest}))
        parts = (q[..., :CKV], q[..., CKV:])
        metadata = SimpleNamespace(decode=decode)
        out, lse = latent.FlashpageMLAImpl.forward_mqa(impl, parts, cache, metadata, layer)
        expected = [
            attention(mine, k, k[..., :CKV], Options(SCALE, causal=True)).out
            for mine, k in zip(q.split(rows), tokens, strict=True)
        ]
        close(out, torch.cat(expected))
        assert lse is None


def check_prompts() -> None:
    """New tokens, and a chunk of earlier ones in the forms of vLLM 0.26 and of later releases."""
    dims = {"kv_lora_rank": CKV, "qk_nope_head_dim": 24, "qk_rope_head_dim": 24, "v_head_dim": 32}
    backend: Any = FlashpagePrefill(num_heads=HEADS, scale=SCALE, vllm_config=object(), **dims).clone()
    for rows, before in (([5, 17], [9, 3]), ([33], [40])):  # two steps
        q, k = torch.randn(sum(rows), HEADS, 48), torch.randn(sum(rows), HEADS, 48)
        v = torch.randn(sum(rows), HEADS, 56)[..., 24:]  # a view, as vLLM passes it
        earlier_k, earlier_v = torch.randn(sum(before), HEADS, 48), torch.randn(sum(before), HEADS, 32)
        starts, ends = indptr(rows), indptr(before)
        counts_before = torch.tensor(before)
        chunks = SimpleNamespace(cu_seq_lens=ends[None], seq_lens=counts_before[None])
        if len(rows) == 1:  # flashpage's builder, whose step has two decodes before the prompt
            backend.take_starts(torch.cat([torch.tensor([0, 1]), 2 + starts]).int())
        backend.prepare_metadata(SimpleNamespace(query_start_loc=starts, chunked_context=chunks))
        requests = slice(0, len(rows))
        chunk = SimpleNamespace(index=0, request_slice=requests, seq_lens=counts_before, cu_seq_lens=ends)
        for _ in range(2):  # layers
            new = backend.run_prefill_new_tokens(q, k, v, True)
            assert torch.equal(backend.run_prefill_new_tokens(q=q, k=k, v=v, return_softmax_lse=False), new[0])
            context = backend.run_prefill_context_chunk(chunk=chunk, q=q, k=earlier_k, v=earlier_v)
            backend._starts.pop(0)
            older = backend.run_prefill_context_chunk(chunk_idx=0, q=q, k=earlier_k, v=earlier_v)
            assert all(map(torch.equal, context, older))
        for found, keys, values, counts, is_causal in (
            (new, k, v, rows, True),
            (context, earlier_k, earlier_v, before, False),
        ):
            tensors = zip(q.split(rows), keys.split(counts), values.split(counts), strict=True)
            states = [attention(*mine, Options(SCALE, causal=is_causal)) for mine in tensors]
            close(found[0], torch.cat([state.out for state in states]))
            close(found[1].T, torch.cat([state.lse for state in states]) * math.log(2))


class Configuration(SimpleNamespace):
    """vLLM's, of which weak references can be made."""


@contextlib.contextmanager
def configured(
    use_mla: bool = False,
    context_ranks: int = 1,
    hisparse: Any = None,
    others: dict[str, Any] | None = None,
    **of_model: Any,
) -> Iterator[None]:
    """As while vLLM makes a model of such a configuration; `others`: its other parts."""
    parts = {
        "model_config": SimpleNamespace(use_mla=use_mla, hf_text_config=SimpleNamespace(**of_model)),
        "parallel_config": SimpleNamespace(decode_context_parallel_size=context_ranks),
        "attention_config": SimpleNamespace(hisparse_config=hisparse),
        "compilation_config": SimpleNamespace(static_forward_context={}),
        "cache_config": SimpleNamespace(block_size=16),
    }
    with mock.patch("vllm.config.vllm._current_vllm_config", Configuration(**parts | (others or {}))):
        yield


def check_names() -> None:
    """CUSTOM is a class for the model's layers. With FLASHPAGE_VLLM=on vLLM's own choices are flashpage."""
    register()
    assert AttentionBackendEnum.CUSTOM.get_class().__name__ == "FlashpageBackend"
    for use_mla, name in ((True, "FlashpageMLABackend"), (False, "FlashpageBackend")):
        with configured(use_mla=use_mla):
            chosen = AttentionBackendEnum.CUSTOM.get_class()
        assert (chosen.__name__, chosen.get_name()) == (name, "CUSTOM")
    os.environ["FLASHPAGE_VLLM"] = "on"
    register()
    assert AttentionBackendEnum["FLASH_ATTN_MLA"].get_class() is latent.InPlaceOfFlashAttnMLA
    assert AttentionBackendEnum["FLASHMLA"].get_class() is latent.InPlaceOfFlashMLA
    for prefill in (MLAPrefillBackendEnum["FLASH_ATTN"], MLAPrefillBackendEnum.CUSTOM):
        assert prefill.get_class() is FlashpagePrefill


def check_answers() -> None:
    served: list[dict[str, Any]] = [{}, {"head_size": 320}, {"block_size": 1}, {"kv_cache_dtype": "fp8"}]
    for changes in served:
        assert latent.FlashpageMLABackend.validate_configuration(**USUAL | changes) == [], changes
    refused: list[tuple[dict[str, Any], str]] = [
        ({"use_mla": False}, "MLA"),
        ({"use_sparse": True}, "sparse"),
        ({"head_size": 128}, "head_size"),
        ({"dtype": torch.float32}, "dtype"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype"),
        ({"device_capability": TURING}, "compute capability"),
    ]
    for changes, reason in refused:
        found = latent.FlashpageMLABackend.validate_configuration(**USUAL | changes)
        assert any(reason in text for text in found), (changes, found)
    with configured(use_mla=True, context_ranks=2):
        (found,) = latent.FlashpageMLABackend.validate_configuration(**USUAL)
    assert "no decode context parallelism" in found


def check() -> None:
    check_decodes([1, 1, 1], [40, 5, 17])
    check_decodes([1, 1, 1], [40, 5, 17], graph_requests=4)
    check_decodes([1, 3, 2], [40, 5, 17])
    check_decodes([1, 3, 2], [40, 5, 17], dtype=torch.float8_e4m3fn)
    check_prompts()
    check_answers()
    check_names()
