"""The tokens of a cache block of layers with a window.

vLLM 0.26 gives such a layer the smallest block that its backend supports, which is of one token here. If a model also
has layers without a window, vLLM enlarges these blocks to those of the other layers. If it has none, the blocks would
stay at one token, whatever --block-size says. Later versions give the layer the blocks of the others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_MARK = "has_flashpage_configuration"  # of the method that prepare has replaced


def prepare() -> None:
    """Makes the engine's configuration the current one while a layer of vLLM says what it needs of the cache, as vLLM
    has none then: `sizes` must answer for this engine, and not for another one of this process or for its draft."""
    from vllm.model_executor.layers.attention.attention import Attention

    method = Attention.get_kv_cache_spec
    if not hasattr(method, _MARK):
        Attention.get_kv_cache_spec = _within_configuration(method)


def _within_configuration(method: Callable[..., Any]) -> Callable[..., Any]:
    from vllm.config import set_current_vllm_config

    @functools.wraps(method)
    def get_kv_cache_spec(layer: Any, vllm_config: Any) -> Any:
        with set_current_vllm_config(vllm_config):
            return method(layer, vllm_config)

    setattr(get_kv_cache_spec, _MARK, True)
    return get_kv_cache_spec


def sizes() -> list[int]:
    """The block sizes that the backend lists before the multiples of 1, because vLLM prefers them: the size that the
    user chose, if all layers with a cache have a window; else none. If some layers have wider elements than the others
    (--kv-cache-dtype-skip-layers), blocks share a size in bytes, in which vLLM takes the largest of these that fits."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    if config is None:
        return []
    layers, cache = config.compilation_config.static_forward_context.values(), config.cache_config
    if getattr(cache, "skip_page_size_padded", None):
        return list(range(1, cache.block_size + 1))
    windows = [getattr(layer, "sliding_window", None) for layer in layers if hasattr(layer, "get_kv_cache_spec")]
    return [cache.block_size] if windows and all(windows) else []
