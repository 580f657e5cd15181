"""The tokens of a cache block of layers with a window, in vLLM 0.26.

This version gives such a layer the smallest block that its backend supports, which is of one token here. If a model
also has layers without a window, vLLM enlarges these blocks to those of the other layers. If it has none, the blocks
would stay at one token, whatever --block-size says. Later versions give the layer the blocks of the others.

vLLM calls a method of the backend's class, and has no current configuration then. So the layers of an engine have a
class that knows the engine.
"""

from __future__ import annotations

import inspect
import types
import weakref
from typing import Any, ClassVar


def give(impl: Any) -> None:
    """Gives the layer of `impl` such a class. vLLM calls `impl` when it has loaded the weights, and the engine's
    configuration is the current one then, also if the layer is a draft's."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    if config is None or not _are_needed():
        return
    for layer in config.compilation_config.static_forward_context.values():
        if getattr(layer, "impl", None) is impl and getattr(layer, "sliding_window", None):
            layer.attn_backend = _of_engine(layer.attn_backend, config)


def _are_needed() -> bool:
    """Later versions of vLLM pass the layer's needs to that method."""
    from vllm.v1.attention.backend import AttentionBackend

    return not inspect.signature(AttentionBackend.get_supported_kernel_block_sizes).parameters


class _OfEngine:
    """The answer that depends on the engine, before those of a backend."""

    engine: ClassVar[weakref.ref[Any]]  # its configuration

    @classmethod
    def get_supported_kernel_block_sizes(cls) -> list[Any]:
        backend: Any = super()
        return [*_sizes(cls.engine()), *backend.get_supported_kernel_block_sizes()]


def _of_engine(backend: type[Any], config: Any) -> type[Any]:
    """vLLM groups layers by the names of their backends, which stay."""
    if issubclass(backend, _OfEngine):  # the weights are loaded again
        return backend
    names = {"__module__": backend.__module__, "__qualname__": backend.__qualname__, "engine": weakref.ref(config)}
    return types.new_class(backend.__name__, (_OfEngine, backend), exec_body=lambda body: body.update(names))


def _sizes(config: Any) -> list[int]:
    """The block sizes that the backend lists before the multiples of 1, because vLLM prefers them: the size that the
    user chose, if all layers with a cache have a window; else none. If some layers have wider elements than the others
    (--kv-cache-dtype-skip-layers), blocks share a size in bytes, in which vLLM takes the largest of these that fits."""
    if config is None:  # the engine has ended
        return []
    layers, cache = config.compilation_config.static_forward_context.values(), config.cache_config
    if getattr(cache, "skip_page_size_padded", None):
        return list(range(1, cache.block_size + 1))
    windows = [getattr(layer, "sliding_window", None) for layer in layers if hasattr(layer, "get_kv_cache_spec")]
    return [cache.block_size] if windows and all(windows) else []
