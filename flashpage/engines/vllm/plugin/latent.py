"""flashpage for vLLM's layers with latent rows (MLA), on vLLM's MLACommon classes: decode here, prompts in
latent_prefill.py. Rows are of 16 bits or, with one scale, e4m3."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonDecodeMetadata,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionCGSupport

from ....run.checks import NO_SCALES
from ...plugin.group_plans import Workspaces
from ...plugin.joined import joined
from ...plugin.latent_plans import LatentPlans
from ...plugin.layers import LayerOptions
from ...plugin.parts import LayerTensors
from .. import cache_layout
from . import support
from .builder import FlashpageBuilder
from .latent_prefill import FlashpagePrefill
from .latent_write import LatentWriter
from .planner import GroupPlanner
from .step import Step


@dataclasses.dataclass
class LatentDecodeMetadata(MLACommonDecodeMetadata):
    """The decodes of a step, and their plans."""

    step: Step


class FlashpageMLABuilder(MLACommonMetadataBuilder):
    """Makes the plans of one group of layers."""

    query_len_support: ClassVar[Any] = QueryLenSupport.VARLEN
    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, MLACommonMetadata)
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        layers = vllm_config.compilation_config.static_forward_context
        self._impls = [layers[name].impl for name in layer_names]
        sizes = FlashpageBuilder._sizes(self)._replace(has_exact_lengths=False, has_rotation=False)
        sizes = sizes._replace(max_rows=sizes.max_requests * sizes.few_rows)  # decodes alone
        options = [impl.options for impl in self._impls]
        ckv = self._impls[0].kv_lora_rank
        self._planner = GroupPlanner(LatentPlans(ckv, options, sizes, device, Workspaces.of(vllm_config)))
        self._planner.prebuild()
        if isinstance(self._prefill_backend, FlashpagePrefill):
            self._prefill_backend.prebuild(device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        if isinstance(self._prefill_backend, FlashpagePrefill):
            self._prefill_backend.take_starts(common_attn_metadata.query_start_loc_cpu)
        return super().build(common_prefix_len, common_attn_metadata, fast_build)

    def _build_decode(
        self,
        block_table_tensor: torch.Tensor,
        seq_lens_device: torch.Tensor,
        max_seq_len: int,
        query_start_loc_cpu: torch.Tensor,
        query_start_loc_device: torch.Tensor,
        num_decode_tokens: int,
        dcp_tot_seq_lens_device: torch.Tensor | None,
        max_query_len: int | None = None,
    ) -> LatentDecodeMetadata:
        if max_query_len is None:  # vLLM 0.26
            max_query_len = int(query_start_loc_cpu.diff().max())
        decodes = SimpleNamespace(
            num_reqs=len(seq_lens_device),
            num_actual_tokens=num_decode_tokens,
            max_query_len=max_query_len,
            causal=True,
            seq_lens=seq_lens_device,
            block_table_tensor=block_table_tensor,
            query_start_loc=query_start_loc_device,
            query_start_loc_cpu=query_start_loc_cpu,
            slot_mapping=None,
        )
        step = self._planner.plan(decodes)
        return LatentDecodeMetadata(block_table_tensor, seq_lens_device, dcp_tot_seq_lens_device, step)


class FlashpageMLAImpl(support.LatentLayer, LatentWriter, MLACommonImpl):
    """Runs a layer's decodes by the step's plans; MLACommonImpl expands prompts and calls the prefill backend."""

    def __init__(self, num_heads: int, head_size: int, scale: float, *given: Any, **latent: Any) -> None:
        super().__init__(num_heads, head_size, scale, *given, **latent)
        kv_cache_dtype: str = self.kv_cache_dtype
        self._is_fp8 = kv_cache_dtype in cache_layout.FP8
        self.options = LayerOptions((num_heads, 1, head_size), scale)

    def forward_mqa(self, q: Any, kv_c_and_k_pe_cache: torch.Tensor, attn_metadata: Any, layer: Any) -> Any:
        """Absorbed queries [rows, heads, columns] (or their two parts) over the cache [blocks, page, columns]."""
        q = joined(q) if isinstance(q, tuple) else q
        out = q.new_empty(*q.shape[:2], self.kv_lora_rank)
        cache: Any = kv_c_and_k_pe_cache  # one tensor, as K and V are one row
        scales = (None, layer._k_scale_float, layer._k_scale_float) if self._is_fp8 else NO_SCALES
        tensors = LayerTensors(q, None, None, cache, out, scales, None)
        for part in attn_metadata.decode.step.parts:
            part.run(self.options, tensors)
        return out, None

    def _concat_k_nope_k_pe(self, k_nope: torch.Tensor, k_pe: torch.Tensor) -> torch.Tensor:
        """Expanded keys of prompts, [tokens, heads, dim], with their rotated columns, which all heads share."""
        if self._use_flashinfer_concat_mla_k or not k_pe.shape[-1]:
            return super()._concat_k_nope_k_pe(k_nope, k_pe)
        return joined((k_nope, k_pe))


class FlashpageMLABackend(support.Answers, MLACommonBackend):
    """flashpage in the places of the classes below."""

    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16", "fp8", "fp8_e4m3"]
    has_latent_rows = True

    @staticmethod
    def get_impl_cls() -> type[Any]:
        return FlashpageMLAImpl

    @staticmethod
    def get_builder_cls() -> type[Any]:
        return FlashpageMLABuilder

    @classmethod
    def validate_configuration(cls, *args: Any, **given: Any) -> list[str]:
        reasons = super().validate_configuration(*args, **given)
        if support.context_ranks() > 1:
            reasons.append("flashpage: no decode context parallelism over latent rows")
        return reasons

    @classmethod
    def refusal(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str, block_size: int | None, capability: Any
    ) -> str | None:
        return support.latent_refusal(head_size, dtype, kv_cache_dtype, block_size or 64, capability)


class InPlaceOfFlashAttnMLA(FlashpageMLABackend, name="FLASH_ATTN_MLA"):
    pass


class InPlaceOfFlashMLA(FlashpageMLABackend, name="FLASHMLA"):
    pass


class InPlaceOfCpuMLA(FlashpageMLABackend, name="CPU_MLA"):
    supported_dtypes = support.CPU_DTYPES
