"""flashpage for vLLM's layers over latent rows whose indexer lists the tokens that a row of q reads (DeepSeek V3.2), on
vLLM's common classes for them. Rows are of 16 bits, e4m3 with one scale, or DeepSeek's of 656 bytes; any number of
heads, without padding."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from vllm import envs
from vllm.model_executor.layers.attention import sparse_mla_attention
from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend
from vllm.model_executor.layers.attention.sparse_mla_attention import (
    SparseMLACommonImpl,
    SparseMLACommonMetadataBuilder,
)
from vllm.v1.attention.backend import AttentionCGSupport

from ....kernels.latent_formats import PACKED
from ...plugin.group_plans import SPLIT_TOKENS, Workspaces
from ...plugin.joined import joined
from ...plugin.listed_plans import ListedPlans
from .. import cache_layout
from . import support

_ROW_FORMATS = {"fp8_ds_mla": "deepseek_v32"}  # vLLM's cache types whose rows hold their scales


if hasattr(sparse_mla_attention, "SparseMLACommonMetadata"):
    _Base: Any = sparse_mla_attention.SparseMLACommonMetadata
else:  # vLLM 0.26

    @dataclasses.dataclass(kw_only=True)
    class _Fields:
        num_reqs: int
        max_query_len: int
        max_seq_len: int
        num_actual_tokens: int
        query_start_loc: torch.Tensor
        slot_mapping: torch.Tensor
        block_table: torch.Tensor
        req_id_per_token: torch.Tensor
        seq_lens: torch.Tensor
        block_size: int
        topk_tokens: int
        num_decodes: int
        num_prefills: int
        num_decode_tokens: int
        prefill_max_seq_len: int = 0
        prefill: Any = None
        cp_kv_cache_interleave_size: int = 1

    _Base = _Fields


@dataclasses.dataclass(kw_only=True)
class SparseMetadata(_Base):
    """A step, as vLLM's builder and common classes know it, and its plans."""

    plans: ListedPlans | None = None


class FlashpageSparseBuilder(SparseMLACommonMetadataBuilder):
    """Makes the plans of one group of layers. Prompts whose context is no longer than a list may go to vLLM's backend
    for prompts, so a step has a plan for all of its rows, and one for its decodes."""

    metadata_cls = SparseMetadata
    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.UNIFORM_BATCH
    require_uniform_decodes: ClassVar[bool] = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        layers = vllm_config.compilation_config.static_forward_context
        self._impl: FlashpageSparseImpl = layers[layer_names[0]].impl
        given = self._impl.plan_arguments(kv_cache_spec.block_size, self.model_config.dtype)
        self._plans = ListedPlans(given, torch.device(device), Workspaces.of(vllm_config))

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> SparseMetadata:
        self._plans.keep(common_attn_metadata.num_actual_tokens)
        captured: SparseMetadata = super().build_for_cudagraph_capture(common_attn_metadata)
        return captured

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> SparseMetadata:
        metadata: SparseMetadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        metadata.plans = self._plans
        lists = self._impl.topk_indices_buffer
        assert lists is not None
        for rows in (metadata.num_actual_tokens, metadata.num_decode_tokens):
            self._plans.plan(lists[:rows])
        return metadata


class FlashpageSparseImpl(support.LatentLayer, SparseMLACommonImpl):
    """Runs a layer's rows over their lists."""

    def plan_arguments(self, page_size: int, dtype: torch.dtype) -> dict[str, Any]:
        """The arguments of BatchMLASparseAttentionWrapper.plan, without the lists."""
        return {
            "num_heads": self.num_heads,
            "head_dim_ckv": self.kv_lora_rank,
            "head_dim_kpe": self.qk_rope_head_dim,
            "page_size": page_size,
            "sm_scale": self.scale,
            "q_data_type": dtype,
            "kv_data_type": cache_layout.FP8.get(self.kv_cache_dtype),
            "kv_row_format": _ROW_FORMATS.get(self.kv_cache_dtype),
            "fixed_split_size": SPLIT_TOKENS if envs.VLLM_BATCH_INVARIANT else None,
        }

    def forward_mqa(self, q: Any, kv_c_and_k_pe_cache: torch.Tensor, attn_metadata: SparseMetadata, layer: Any) -> Any:
        """Absorbed queries [rows, heads, columns] (or their two parts) over the cache [blocks, page, columns or bytes].
        Rows of prompts may be missing."""
        q = joined(q) if isinstance(q, tuple) else q
        rows, out = len(q), q.new_empty(*q.shape[:2], self.kv_lora_rank)
        assert self.topk_indices_buffer is not None and attn_metadata.plans is not None
        slots = slots_of(attn_metadata, self.topk_indices_buffer[:rows])
        cache, scales = kv_c_and_k_pe_cache, {}
        if self.kv_cache_dtype in _ROW_FORMATS:
            cache = cache.view(torch.uint8)
        elif self.kv_cache_dtype in cache_layout.FP8:
            scales = {"ckv_scale": layer._k_scale_float, "kpe_scale": layer._k_scale_float}
        attn_metadata.plans.of(rows).run(query=q, kv_cache=cache, indices=slots, out=out, **scales)
        return out, None


def slots_of(metadata: SparseMetadata, tokens: torch.Tensor) -> torch.Tensor:
    """The cache's slots of tokens that are counted in their own request; -1 stays."""
    requests, page = metadata.req_id_per_token[: len(tokens)], metadata.block_size
    if tokens.is_cuda:
        from vllm.v1.attention.backends.mla.sparse_utils import triton_convert_req_index_to_global_index

        sizes = {"BLOCK_SIZE": page, "NUM_TOPK_TOKENS": tokens.shape[1]}
        found: torch.Tensor = triton_convert_req_index_to_global_index(requests, metadata.block_table, tokens, **sizes)
        return found
    exist = tokens.clamp(min=0)
    pages = metadata.block_table[requests.long()].gather(1, (exist // page).long())
    return torch.where(tokens < 0, -1, pages * page + exist % page).int()


class FlashpageSparseBackend(support.Answers, MLACommonBackend):
    """flashpage for vLLM's layers over lists of tokens; subclasses take the place of the backend that they name."""

    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16", "fp8", "fp8_e4m3", *_ROW_FORMATS]
    has_latent_rows = True

    @staticmethod
    def get_impl_cls() -> type[Any]:
        return FlashpageSparseImpl

    @staticmethod
    def get_builder_cls() -> type[Any]:
        return FlashpageSparseBuilder

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [576]

    @classmethod
    def is_sparse(cls) -> bool:
        return True

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        row_format = _ROW_FORMATS.get(cache_dtype_str)
        return num_blocks, block_size, head_size if row_format is None else PACKED[row_format].row_bytes

    @classmethod
    def validate_configuration(cls, *args: Any, **given: Any) -> list[str]:
        reasons = super().validate_configuration(*args, **given)
        if support.context_ranks() > 1:
            reasons.append("flashpage: no decode context parallelism over lists of tokens")
        if support.has_host_cache():
            reasons.append("flashpage: no cache in the host's memory (hisparse_config)")
        return reasons

    @classmethod
    def refusal(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str, block_size: int | None, capability: Any
    ) -> str | None:
        row_format = _ROW_FORMATS.get(kv_cache_dtype)
        return support.listed_refusal(head_size, dtype, kv_cache_dtype, block_size or 64, row_format, capability)


class InPlaceOfFlashMLASparse(FlashpageSparseBackend, name="FLASHMLA_SPARSE"):
    pass
