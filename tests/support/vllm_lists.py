"""Checks of flashpage's classes for vLLM's layers whose rows read lists of tokens (DeepSeek V3.2), without a model."""

from __future__ import annotations

import os
import sys
import warnings
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from reference import Options, attention
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig
from vllm_latent import TURING, USUAL, configured, indptr

from flashpage.engines.plugin.group_plans import Workspaces
from flashpage.engines.plugin.listed_plans import ListedPlans
from flashpage.engines.vllm.plugin import latent, register, sparse, sparse_places
from flashpage.engines.vllm.plugin.latent_write import write
from flashpage.kernels.latent_formats import PACKED

AMPERE, HOPPER, BLACKWELL = DeviceCapability(8, 0), DeviceCapability(9, 0), DeviceCapability(10, 0)
GEFORCE_BLACKWELL = DeviceCapability(12, 0)


def check_lists(rows: list[int], lengths: list[int], kind: str, device: str = "cpu", kpe: int = 64) -> None:
    """Rows that read lists of their own requests' tokens, all of a step and its first ones alone, with one plan for
    each number of rows."""
    torch.manual_seed(0)
    ckv, heads, topk, page, scale = 512, 3, 128, 16, 0.05
    pages = [-(-n // page) for n in lengths]
    tables = torch.zeros(len(rows), max(pages), dtype=torch.int32)
    order = torch.randperm(sum(pages)).int()
    tokens = [torch.randn(n, ckv + kpe).bfloat16() for n in lengths]
    fp8 = torch.zeros(sum(pages), page, ckv + kpe, dtype=torch.float8_e4m3fn)
    packed = torch.zeros(sum(pages), page, PACKED["deepseek_v32"].row_bytes, dtype=torch.uint8)
    cache = {"auto": fp8.bfloat16(), "fp8": fp8, "fp8_ds_mla": packed}[kind]
    for i, (mine, count) in enumerate(zip(tokens, pages, strict=True)):
        tables[i, :count] = order[sum(pages[:i]) :][:count]
        at = torch.arange(len(mine))
        slots = (tables[i, at // page] * page + at % page).long()
        write(mine[:, :ckv].contiguous(), mine[:, ckv:].contiguous(), cache, slots, kind, torch.tensor(0.5))
    lists = torch.full((sum(rows) + 2, topk), -1, dtype=torch.int32)  # vLLM's buffer has more rows
    requests = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(rows)).int()
    for row, request in enumerate(requests.tolist()):
        count = min(topk, lengths[request])
        lists[row, :count] = torch.randperm(lengths[request])[:count].int()
    own = lists.to(device)
    sizes: dict[str, Any] = {"kv_lora_rank": ckv, "qk_rope_head_dim": kpe, "num_heads": heads, "scale": scale}
    impl: Any = SimpleNamespace(**sizes, topk_indices_buffer=own)
    impl.kv_cache_dtype = kind
    arguments = sparse.FlashpageSparseImpl.plan_arguments(impl, page, torch.bfloat16)
    assert arguments["fixed_split_size"] is None
    with mock.patch.dict(os.environ, VLLM_BATCH_INVARIANT="1"):
        assert sparse.FlashpageSparseImpl.plan_arguments(impl, page, torch.bfloat16)["fixed_split_size"]
    plans = ListedPlans(arguments, torch.device(device), Workspaces())
    plans.keep(2)
    counts = {"num_reqs": len(rows), "max_query_len": max(rows), "max_seq_len": max(lengths), "topk_tokens": topk}
    counts |= {"num_actual_tokens": sum(rows), "num_decodes": 2, "num_prefills": len(rows) - 2, "num_decode_tokens": 2}
    starts, lens = indptr(rows), torch.tensor(lengths)
    places = {"query_start_loc": starts, "slot_mapping": starts, "seq_lens": lens}
    places |= {"req_id_per_token": requests.to(device)}
    metadata = sparse.SparseMetadata(**counts, **places, block_table=tables.to(device), block_size=page, plans=plans)
    q = torch.randn(sum(rows), heads, ckv + kpe).bfloat16()
    for count in (sum(rows), 2, sum(rows)):
        plans.plan(own[:count])
        parts = (q[:count, :, :ckv].to(device), q[:count, :, ckv:].to(device))
        layer = SimpleNamespace(_k_scale_float=0.5)
        out, lse = sparse.FlashpageSparseImpl.forward_mqa(impl, parts, cache.to(device), metadata, layer)
        assert lse is None and len(out) == count
        for row in range(count):
            listed = lists[row][lists[row] >= 0].long()
            k = tokens[requests[row]][listed].unsqueeze(1)
            expected = attention(q[row : row + 1], k, k[..., :ckv], Options(scale)).out
            error = (out[row].cpu().double() - expected[0]).norm() / expected.norm()
            assert error < (0.01 if kind == "auto" else 0.06), (kind, row, error)


def check_answers() -> None:
    """Each place has the cache types of vLLM's backend there, so that a type names the same rows."""
    usual = USUAL | {"use_sparse": True}
    ask = sparse.FlashpageSparseBackend.validate_configuration
    for served in ({}, {"kv_cache_dtype": "fp8_ds_mla"}, {"kv_cache_dtype": "fp8"}, {"block_size": 16}):
        assert ask(**usual | served) == [], served
    no_rotation = {"head_size": 512}
    refused: list[tuple[dict[str, Any], str]] = [
        ({"use_sparse": False}, "sparse"),
        ({"head_size": 320}, "head_size"),
        (no_rotation | {"kv_cache_dtype": "fp8_ds_mla"}, "656 bytes"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype"),
        ({"device_capability": TURING}, "compute capability"),
    ]
    for changes, reason in refused:
        found = ask(**usual | changes)
        assert any(reason in text for text in found), (changes, found)
    assert ask(**usual | no_rotation) == []
    for own, kinds in (
        (sparse.InPlaceOfFlashAttnMLASparse, ("auto", "bfloat16")),
        (sparse.InPlaceOfFlashMLASparse, ("auto", "bfloat16", "fp8", "fp8_ds_mla")),
        (sparse.InPlaceOfFlashInferMLASparseSM90, ("auto", "bfloat16", "fp8")),
        (sparse.InPlaceOfFlashInferMLASparseSM120, ("auto", "fp8", "fp8_ds_mla")),
    ):
        for kind in ("auto", "bfloat16", "fp8", "fp8_ds_mla"):
            assert (own.validate_configuration(**usual | {"kv_cache_dtype": kind}) == []) == (kind in kinds), (
                own,
                kind,
            )
    packed = no_rotation | {"kv_cache_dtype": "fp8"}
    assert sparse.InPlaceOfFlashInferMLASparseSM90.validate_configuration(**usual | packed) == []
    assert sparse.InPlaceOfFlashMLASparse.validate_configuration(**usual | packed) != []
    with configured(use_mla=True, hisparse=object()):
        (reason,) = ask(**usual)
    assert "hisparse_config" in reason
    with configured(use_mla=True, qk_rope_head_dim=32):
        (reason,) = ask(**usual)
    assert "not of 512 and 32" in reason
    assert not sparse.FlashpageSparseImpl.supports_pcp and not latent.FlashpageMLAImpl.supports_pcp
    assert sparse.FlashpageSparseBackend.get_kv_cache_shape(7, 64, 1, 576, "fp8_ds_mla") == (7, 64, 656)
    with configured(use_mla=True, index_topk=2048):
        assert AttentionBackendEnum.CUSTOM.get_class() is sparse.FlashpageSparseBackend


def check_own_choice() -> None:
    """With FLASHPAGE_VLLM=on vLLM's own choice on a card is flashpage, whichever of its backends is first there."""
    for operators in ("vllm._C", "vllm._C_stable_libtorch"):
        sys.modules.setdefault(operators, ModuleType(operators))  # those of a card: a choice calls none
    from vllm.platforms.cuda import CudaPlatformBase

    overrides = "vllm.v1.attention.backends.registry._ATTN_OVERRIDES"
    usual = AttentionSelectorConfig(576, torch.bfloat16, "auto", None, use_mla=True, use_sparse=True)
    known = AttentionBackendEnum.__members__
    newer = [("FLASHINFER_MLA_SPARSE_SM90", HOPPER, {"head_size": 512, "kv_cache_dtype": "fp8"})]
    newer += [("FLASH_ATTN_MLA_SPARSE_FA4", BLACKWELL, {})]
    chosen: list[tuple[str, DeviceCapability, dict[str, Any]]] = [
        ("FLASH_ATTN_MLA_SPARSE", AMPERE, {}),
        ("FLASH_ATTN_MLA_SPARSE", HOPPER, {}),
        ("FLASHMLA_SPARSE", HOPPER, {"kv_cache_dtype": "fp8"}),
        ("FLASHMLA_SPARSE", HOPPER, {"kv_cache_dtype": "fp8_ds_mla"}),
        ("FLASHINFER_MLA_SPARSE", BLACKWELL, {"kv_cache_dtype": "fp8"}),
        ("FLASHMLA_SPARSE", BLACKWELL, {"kv_cache_dtype": "fp8_ds_mla"}),
        ("FLASHINFER_MLA_SPARSE_SM120", GEFORCE_BLACKWELL, {}),
        *[row for row in newer if row[0] in known],
    ]
    with mock.patch.dict(overrides, clear=True), mock.patch.dict(os.environ, FLASHPAGE_VLLM="on"):
        register()
        for place, card, changes in chosen:
            rotated = 0 if changes.get("head_size") == 512 else 64
            with configured(use_mla=True, index_topk=2048, qk_rope_head_dim=rotated):
                assert chosen_class(CudaPlatformBase, card, usual._replace(**changes)) is getattr(
                    sparse, sparse_places.CLASSES[place]
                ), (place, card, changes)
        assert {place for place, *_ in chosen} == sparse_places.CLASSES.keys() & known.keys()


def chosen_class(platform: Any, card: DeviceCapability, given: AttentionSelectorConfig) -> Any:
    needs_card = {"vllm.v1.attention.backends.mla.cutlass_mla": None}  # allocates when it is imported
    card_of = mock.patch.object(platform, "get_device_capability", return_value=card)
    with card_of, mock.patch.dict(sys.modules, needs_card):
        path = platform.get_attn_backend_cls(None, given, 16)
    module, _, name = path.rpartition(".")
    return getattr(sys.modules[module], name)


def check_left_to_vllm() -> None:
    """What flashpage does not serve stays vLLM's own, with a warning: there is no next backend. Other models ask for
    these classes too, and get no warning."""
    ours = {place: getattr(sparse, name) for place, name in sparse_places.CLASSES.items()}
    types = {kind: SimpleNamespace(cache_dtype=kind) for kind in ("auto", "fp8_ds_mla", "nvfp4_ds_mla")}
    lists = {"use_mla": True, "index_topk": 2048}
    fa3, sm120 = "FLASH_ATTN_MLA_SPARSE", "FLASHINFER_MLA_SPARSE_SM120"
    unserved: list[tuple[str, dict[str, Any], str]] = [
        (fa3, {"context_ranks": 2}, "no decode context parallelism"),
        (fa3, {"hisparse": object()}, "hisparse_config"),
        (fa3, {"others": {"cache_config": types["nvfp4_ds_mla"]}}, "no KV cache of nvfp4_ds_mla"),
        (fa3, {"qk_rope_head_dim": 0, "others": {"cache_config": types["fp8_ds_mla"]}}, "656 bytes"),
        (sm120, {"qk_rope_head_dim": 0, "others": {"cache_config": types["auto"]}}, "656 bytes"),
        (fa3, {"kv_lora_rank": 256}, "not of 256 and 64"),
    ]
    for place, changes, reason in unserved:
        sparse_places._say.cache_clear()
        with configured(**lists | changes), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(2):  # layers
                found = own_or_ours(place)
        assert found is not ours[place], changes
        (line,) = [str(one.message) for one in said if "lists of tokens" in str(one.message)]
        assert reason in line, (changes, line)
    served: list[dict[str, Any]] = [lists, lists | {"others": {"cache_config": types["fp8_ds_mla"]}}]
    served += [{"use_mla": True, "context_ranks": 2}]  # no lists
    for given in served:
        with configured(**given), warnings.catch_warnings():
            warnings.simplefilter("error")
            assert all(getattr(sparse_places, name) is own for name, own in ours.items()), given


def own_or_ours(place: str) -> Any:
    """vLLM's own class is not imported, as it needs a card's operators: its path is given instead."""
    with mock.patch("vllm.utils.import_utils.resolve_obj_by_qualname", lambda path: path):
        found = getattr(sparse_places, place)
    assert not isinstance(found, str) or found == AttentionBackendEnum[place].value
    return found


def check() -> None:
    for kind in ("auto", "fp8", "fp8_ds_mla"):
        check_lists([1, 1, 5], [200, 5, 17], kind)
    check_lists([1, 1, 5], [200, 5, 17], "auto", kpe=0)
    check_answers()
    check_own_choice()
    check_left_to_vllm()
