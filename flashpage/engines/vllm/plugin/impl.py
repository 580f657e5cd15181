"""One attention layer of vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from ....run.checks import NO_SCALES, Scales
from ...plugin.layers import LayerOptions
from ...plugin.parts import LayerTensors
from .. import cache_layout, rotate
from . import cache, causal_flags, fusion, image_ranges, output_quant, reference_windows, window_blocks
from .step import Step


class FlashpageImpl(AttentionImpl):
    """Runs a layer by the step's plans."""

    can_return_lse_for_decode = True
    lse_base_on_e = False
    supports_dcp = True
    supports_mtp_with_cp_non_trivial_interleave_size = True
    has_plans = False  # whether a builder has made plans for the layer's options, which then stay as they are

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: Sequence[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype, self.attn_type = kv_cache_dtype, attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sliding_window, self.alibi_slopes = sliding_window, alibi_slopes
        self.sinks, self._given_sinks = sinks, sinks  # [num_heads] each; kernels read those of fp32
        if self.dcp_world_size > 1 and (alibi_slopes is not None or sliding_window is not None):
            raise NotImplementedError(
                "flashpage has no ALiBi and no sliding window with decode context parallelism: a rank's tokens are not "
                "consecutive. Choose another attention backend, or --decode-context-parallel-size 1."
            )
        self.is_encoder = attn_type in (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)
        self.options = LayerOptions(
            (num_heads, self.num_kv_heads, head_size),
            scale,
            slopes=alibi_slopes,
            window=sliding_window,
            soft_cap=logits_soft_cap,
            is_encoder=self.is_encoder,
        )
        self._slopes = self.options.slopes_on(torch.empty(0).device)  # vLLM makes layers where they will run
        config = get_current_vllm_config()
        ranks, is_invariant = self.dcp_world_size, envs.VLLM_BATCH_INVARIANT
        refused = (
            causal_flags.refusal(config, self.options, ranks)
            or image_ranges.refusal(config, self.options, ranks, is_invariant)
            or reference_windows.refusal(config, self.options, is_invariant)
        )
        if refused is not None:
            raise NotImplementedError(refused)
        fusion.prepare(config)
        self._is_fp8 = kv_cache_dtype in cache_layout.FP8
        self._writes_e4m3 = not self.is_encoder and output_quant.is_served(config, self.dcp_world_size)
        self._halves: tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]] | None = None
        self._scales: Scales = NO_SCALES  # of an fp8 cache, from the first run on

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """vLLM calls this again after each load of weights. Captured graphs then still read the tensors of the first
        load, which have lost their contents if the engine slept at level 2."""
        window_blocks.give(self)
        self._scales = NO_SCALES  # a quantisation method may have replaced the layer's tensors
        if self._slopes is not None:
            self._slopes.copy_(torch.tensor(self.options.kind.slopes, dtype=torch.float32, device="cpu"))
        given = self._given_sinks
        if given is None or given.dtype == torch.float32:
            return
        assert self.sinks is not None
        if self.sinks is given:
            self.sinks = given.detach().to(torch.float32)
        else:
            self.sinks.copy_(given.detach())

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: Step | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of the step's rows into `output`, both [tokens, num_heads, head_size]; later rows are padding.

        Args:
            output_scale: `output` is e4m3 and divided by it, one fp32 value.
        """
        if output_block_scale is not None:
            raise NotImplementedError("flashpage writes no outputs with scales of blocks for vLLM.")
        if attn_metadata is None:  # a run by which vLLM measures memory, before it makes builders, or warms up
            if output_scale is not None and self._writes_e4m3 and not self.has_plans:
                self.options = self.options.with_outputs(output.dtype)
            return output.fill_(0)
        scales = self._scales
        if self._is_fp8 and scales is NO_SCALES:
            # The tensors by which the cache is written: vLLM resets them, and not the layer's numbers, when it wakes
            # up. They are kept, as attributes of a module cost half of a run.
            scales = self._scales = (None, layer._k_scale, layer._v_scale)
        if output_scale is not None:
            if self.options.kind.out_dtype is None:
                whole = torch.empty_like(output, dtype=query.dtype)
                self.forward(layer, query, key, value, kv_cache, attn_metadata, whole)
                return output_quant.quantize(whole, output_scale, output)
            scales = (*scales, output_scale)
        pages = None if self.is_encoder else self._cache(kv_cache)
        tensors = LayerTensors(query, key, value, pages, output, scales, self.sinks)
        for part in attn_metadata.parts:
            part.run(self.options, tensors)
        return output

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Writes the step's K and V, [tokens, num_kv_heads, head_size]; there are as many slots as tokens, or fewer."""
        if not self.is_encoder:
            scales = layer._k_scale, layer._v_scale
            cache.write(key, value, self._cache(kv_cache), slot_mapping, self.kv_cache_dtype, scales)

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """vLLM's pass AttnQuantFusionPass asks this."""
        return self._writes_e4m3 and output_quant.is_static_e4m3(quant_key)

    def fused_rope_kvcache_supported(self) -> bool:
        """vLLM's pass RopeKVCacheFusionPass asks this."""
        return not self.is_encoder

    def do_rope_and_kv_cache_update(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        positions: torch.Tensor,
        cos_sin_cache: torch.Tensor,
        is_neox: bool,
        kv_cache: torch.Tensor,
        layer_slot_mapping: torch.Tensor,
    ) -> None:
        """`do_kv_cache_update` after the rotation of query and key in place."""
        scales = layer._k_scale, layer._v_scale
        rotation = rotate.Rotation(positions, cos_sin_cache, is_neox)
        cache.write_rotated(
            (query, key, value), rotation, self._cache(kv_cache), layer_slot_mapping, self.kv_cache_dtype, scales
        )

    def _cache(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the layer's cache; the views are kept, as they cost as much as a run."""
        if self._halves is None or self._halves[0] is not kv_cache:
            self._halves = kv_cache, cache.halves(kv_cache, self.head_size, self.kv_cache_dtype)
        return self._halves[1]
