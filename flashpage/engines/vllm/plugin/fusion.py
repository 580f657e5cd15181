"""RoPE and the cache write as one operator in graphs that vLLM compiles, by vLLM's own pass.

vLLM 0.26 to 0.33 applies the pass on ROCm alone, where RoPE is an operator of a graph that is not split before the
cache write. Here it is applied by the same rule, as a custom pass of inductor:

    -cc '{"custom_ops": ["+rotary_embedding"], "splitting_ops": [], "cudagraph_mode": "FULL"}'
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.compilation.passes.inductor_pass import InductorPass

_KEY = "post_grad_custom_post_pass"
_config: Any = None  # vLLM's configuration of the model that was made last
_passes: list[Callable[[Any], None]] = []


def prepare(config: Any) -> None:
    """Adds the pass if the rule says so. Each layer calls this when it is made, before the model is compiled."""
    global _config
    if config is _config:
        return
    _config = config
    _passes.clear()
    compilation = config.compilation_config
    is_whole = compilation.use_inductor_graph_partition or not compilation.splitting_ops_contain_kv_cache_update()
    if compilation.mode == 3 and is_whole and compilation.is_custom_op_enabled("rotary_embedding"):
        compilation.inductor_compile_config.setdefault(_KEY, RotationFusion())


def is_chosen(config: Any) -> bool:
    """Whether compiled graphs call `do_rope_and_kv_cache_update`."""
    return isinstance(config.compilation_config.inductor_compile_config.get(_KEY), RotationFusion)


class RotationFusion(InductorPass):
    """vLLM's passes for the rotation, for any number of tokens. It has no state, since vLLM pickles and hashes it."""

    def __call__(self, graph: Any) -> None:
        if not _passes:
            _passes.extend(_made())
        for fuse in _passes:
            fuse(graph)


def _made() -> list[Callable[[Any], None]]:
    """In the order in which vLLM has them. They need operators of a card when they are imported."""
    from vllm.compilation.passes.fusion.rope_kvcache_fusion import RopeKVCacheFusionPass
    from vllm.compilation.passes.utility.scatter_split_replace import ScatterSplitReplacementPass
    from vllm.compilation.passes.utility.split_coalescing import SplitCoalescingPass
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(_config, check_compile=False):
        return [made(_config) for made in (SplitCoalescingPass, ScatterSplitReplacementPass, RopeKVCacheFusionPass)]
