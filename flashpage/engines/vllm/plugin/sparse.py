"""flashpage for vLLM's layers over latent rows whose indexer lists the tokens that a row of q reads (DeepSeek V3.2), on
vLLM's common classes for them. Rows are of 16 bits, e4m3 with one scale, or DeepSeek's of 656 bytes; any number of
heads, without padding. sparse_places.py chooses between these classes and vLLM's own."""

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
from .latent_write import ROW_FORMATS, LatentWriter

_SIXTEEN_BITS = ["auto", "float16", "bfloat16"]
_ONE_SCALE = ["fp8", "fp8_e4m3"]

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


class FlashpageSparseImpl(support.LatentLayer, LatentWriter, SparseMLACommonImpl):
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
            "kv_row_format": ROW_FORMATS.get(self.kv_cache_dtype),
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
        if self.kv_cache_dtype in ROW_FORMATS:
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
    """flashpage for vLLM's layers over lists of tokens; subclasses take the place of the backend that they name, and
    have its cache types, so that a type means the same rows with flashpage and without."""

    supported_kv_cache_dtypes: ClassVar[list[Any]] = [*_SIXTEEN_BITS, *_ONE_SCALE, *ROW_FORMATS]
    packed_kv_cache_dtypes: ClassVar[frozenset[str]] = frozenset(ROW_FORMATS)  # that vLLM stores in rows of 656 bytes
    has_latent_rows = True

    @staticmethod
    def get_impl_cls() -> type[Any]:
        return FlashpageSparseImpl

    @staticmethod
    def get_builder_cls() -> type[Any]:
        return FlashpageSparseBuilder

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [support.LISTED_COLUMNS, support.LISTED_COLUMNS_WITHOUT_ROTATION]

    @classmethod
    def is_sparse(cls) -> bool:
        return True

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        row_format = ROW_FORMATS.get(cache_dtype_str)
        return num_blocks, block_size, head_size if row_format is None else PACKED[row_format].row_bytes

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Blocks are whole rows apart, as for vLLM's own backends: vLLM 0.32 and newer read some caches as rows."""
        from vllm.v1.attention.backends.mla.sparse_utils import align_blocks_to_rows

        return align_blocks_to_rows(super().customize_spec(spec))

    @classmethod
    def validate_configuration(cls, *args: Any, **given: Any) -> list[str]:
        return super().validate_configuration(*args, **given) + support.unserved_lists()

    @classmethod
    def refusal(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str, block_size: int | None, capability: Any
    ) -> str | None:
        is_packed = kv_cache_dtype in cls.packed_kv_cache_dtypes
        if is_packed and head_size != support.LISTED_COLUMNS:
            return "flashpage: rows of 656 bytes have 64 rotated columns"
        row_format = ROW_FORMATS["fp8_ds_mla"] if is_packed else None
        return support.listed_refusal(head_size, dtype, kv_cache_dtype, block_size or 64, row_format, capability)


class InPlaceOfFlashAttnMLASparse(FlashpageSparseBackend, name="FLASH_ATTN_MLA_SPARSE"):
    supported_kv_cache_dtypes = _SIXTEEN_BITS


class InPlaceOfFlashAttnMLASparseFA4(FlashpageSparseBackend, name="FLASH_ATTN_MLA_SPARSE_FA4"):
    supported_kv_cache_dtypes = _SIXTEEN_BITS


class InPlaceOfFlashMLASparse(FlashpageSparseBackend, name="FLASHMLA_SPARSE"):
    """vLLM stores every fp8 cache of this backend in rows of 656 bytes."""

    packed_kv_cache_dtypes = frozenset([*_ONE_SCALE, *ROW_FORMATS])


class InPlaceOfFlashInferMLASparse(FlashpageSparseBackend, name="FLASHINFER_MLA_SPARSE"):
    supported_kv_cache_dtypes = [*_SIXTEEN_BITS, *_ONE_SCALE]


class InPlaceOfFlashInferMLASparseSM90(FlashpageSparseBackend, name="FLASHINFER_MLA_SPARSE_SM90"):
    supported_kv_cache_dtypes = [*_SIXTEEN_BITS, *_ONE_SCALE]


class InPlaceOfFlashInferMLASparseSM120(FlashpageSparseBackend, name="FLASHINFER_MLA_SPARSE_SM120"):
    """vLLM stores every cache of this backend in rows of 656 bytes, that of `auto` too."""

    supported_kv_cache_dtypes = ["auto", *_ONE_SCALE, *ROW_FORMATS]
    packed_kv_cache_dtypes = frozenset(supported_kv_cache_dtypes)
