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


def prepare(config: Any) -> None:
    """Adds the pass if the rule says so. Each layer calls this when it is made, before the model is compiled."""
    compilation = config.compilation_config
    passes = compilation.inductor_compile_config
    is_free = _KEY not in passes or (is_chosen(config) and not passes[_KEY].is_of(config))
    is_whole = compilation.use_inductor_graph_partition or not compilation.splitting_ops_contain_kv_cache_update()
    if is_free and compilation.mode == 3 and is_whole and compilation.is_custom_op_enabled("rotary_embedding"):
        passes[_KEY] = RotationFusion(config)


def is_chosen(config: Any) -> bool:
    """Whether compiled graphs call `do_rope_and_kv_cache_update`."""
    return isinstance(config.compilation_config.inductor_compile_config.get(_KEY), RotationFusion)


class RotationFusion(InductorPass):
    """vLLM's passes for the rotation, for any number of tokens.

    Args:
        config: vLLM's, of the model whose layers are read. A draft's layers are in the same place. It holds this pass,
            and ends with it. Copies, which vLLM and torch make for keys of caches, do without.
    """

    def __init__(self, config: Any = None) -> None:
        self._config = config
        self._passes: list[Callable[[Any], None]] = []

    def __reduce__(self) -> Any:
        return RotationFusion, ()

    def __call__(self, graph: Any) -> None:
        if not self._passes:
            self._passes.extend(_made(self._config))
        for fuse in self._passes:
            fuse(graph)

    def is_of(self, config: Any) -> bool:
        return self._config is not None and self._config.compilation_config is config.compilation_config


def _made(config: Any) -> list[Callable[[Any], None]]:
    """In the order in which vLLM has them. They need operators of a card when they are imported."""
    from vllm.compilation.passes.fusion.rope_kvcache_fusion import RopeKVCacheFusionPass
    from vllm.compilation.passes.utility.scatter_split_replace import ScatterSplitReplacementPass
    from vllm.compilation.passes.utility.split_coalescing import SplitCoalescingPass
    from vllm.config import get_current_vllm_config, set_current_vllm_config

    config = get_current_vllm_config() if config is None else config
    with set_current_vllm_config(config, check_compile=False):
        return [made(config) for made in (SplitCoalescingPass, ScatterSplitReplacementPass, RopeKVCacheFusionPass)]
