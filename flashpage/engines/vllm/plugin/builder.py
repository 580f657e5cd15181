"""Plans for a group of vLLM's layers: `build` once a step."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm import envs
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder

from ...plugin.group_plans import SPLIT_TOKENS, GroupPlans, GroupSizes, Workspaces
from . import cascade, fusion, image_ranges, reference_windows
from .cache import element_type
from .causal_flags import canvas_of, flags_of
from .plan_streams import PlanStreams
from .planner import GroupPlanner
from .ranks import ranks_of
from .reference_windows import ReferenceWindows
from .step import Step


class FlashpageBuilder(AttentionMetadataBuilder):
    """Makes the plans of one group of layers."""

    supports_draft_decode_metadata_update = True
    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.ALWAYS

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        # vLLM hands `update_block_table` the step of a group with equal layers. In a step of two halves that may be the
        # step of the other half, which has other lengths.
        self.supports_update_block_table = not getattr(vllm_config.parallel_config, "use_ubatching", False)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True, supports_dcp_with_varlen=True)
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        layers = vllm_config.compilation_config.static_forward_context
        own_layers = [layers[name] for name in layer_names]
        self._impls = [layer.impl for layer in own_layers]
        workspaces = Workspaces.of(vllm_config)
        options, sizes = [impl.options for impl in self._impls], self._sizes()
        flags = flags_of(vllm_config, sizes.max_requests, device)
        images = image_ranges.ranges_of(vllm_config, own_layers, sizes, device)
        window = reference_windows.window_of(kv_cache_spec)
        prompts = None if window is None else ReferenceWindows(window, sizes.max_requests, device)
        masks = [given.variant for given in (flags, images, prompts) if given is not None]  # no model has two
        plans = GroupPlans(options, sizes, device, workspaces, mask=masks[0] if masks else None)
        streams = PlanStreams.of(vllm_config, device)
        self._planner = GroupPlanner(plans, ranks_of(self._impls[0], vllm_config), flags, streams, images, prompts)
        self._planner.prebuild()
        for impl in self._impls:
            impl.has_plans = True

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
        if vllm_config.parallel_config.decode_context_parallel_size > 1:
            return AttentionCGSupport.UNIFORM_BATCH  # the host plans the own tokens of other steps
        if image_ranges.has_images(vllm_config):
            return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE  # more rows may be those of an image
        return cls._cudagraph_support

    def _sizes(self) -> GroupSizes:
        config, spec, impl = self.vllm_config, self.kv_cache_spec, self._impls[0]
        scheduler, compilation, model = config.scheduler_config, config.compilation_config, config.model_config
        mode = compilation.cudagraph_mode
        support, canvas = self.get_cudagraph_support(config, spec), canvas_of(config)
        few_rows = max(self.reorder_batch_threshold or 1, canvas + 1 if canvas else 1)  # captured ones have so many
        is_captured = support is not AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE or few_rows == 1
        is_captured = is_captured and mode.has_full_cudagraphs()
        captured = (compilation.max_cudagraph_capture_size or 0) if is_captured else 0
        is_whole = mode.mixed_mode().name == "FULL" and support is AttentionCGSupport.ALWAYS
        captures_all = captured > 0 and is_whole
        has_rows = few_rows > 1 or captures_all or reference_windows.window_of(spec) is not None
        kv_dtype = element_type(impl.kv_cache_dtype, model.dtype)
        assert kv_dtype is not None, impl.kv_cache_dtype
        return GroupSizes(
            page_size=spec.block_size,
            q_dtype=model.dtype,
            kv_dtype=kv_dtype,
            max_requests=max(scheduler.max_num_seqs, captured),
            max_rows=scheduler.max_num_batched_tokens,
            max_tokens=model.max_model_len,
            few_rows=few_rows,
            graph_requests=0 if has_rows else captured,
            graph_rows=captured if has_rows else 0,
            captures_all=captures_all,
            has_exact_lengths=config.speculative_config is None and not canvas,
            split_tokens=SPLIT_TOKENS if envs.VLLM_BATCH_INVARIANT else 0,
            has_rotation=fusion.is_chosen(config),
        )

    # ---------------------------------------------------------------- plans

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Step:
        return self._planner.plan(common_attn_metadata, common_prefix_len)

    def update_block_table(self, metadata: Step, blk_table: torch.Tensor, slot_mapping: torch.Tensor) -> Step:
        """The step of another group with this group's block table."""
        common = metadata.common.replace(block_table_tensor=blk_table, slot_mapping=slot_mapping)
        return self._planner.plan(common)

    def update_draft_decode_metadata(self, metadata: Step) -> None:
        """Plans again, from the lengths on the device at that time; vLLM may capture this call."""
        if metadata.plan_again is None:
            raise NotImplementedError("flashpage planned this step on the host: a graph cannot plan it again.")
        metadata.plan_again()

    def use_cascade_attention(
        self,
        common_prefix_len: int,
        query_lens: Any,
        num_query_heads: int,
        num_kv_heads: int,
        use_alibi: bool,
        use_sliding_window: bool,
        use_local_attention: bool,
        num_sms: int,
        dcp_world_size: int,
    ) -> bool:
        """vLLM 0.26 calls this once a step and group; 0.32 has no cascades."""
        has_e4m3 = any(impl.options.kind.out_dtype is not None for impl in self._impls)  # merged states have 16 bits
        if use_alibi or use_local_attention or dcp_world_size > 1 or has_e4m3:
            return False
        heads = num_query_heads, num_kv_heads
        return cascade.is_worth(common_prefix_len, query_lens, *heads, use_sliding_window, num_sms)
