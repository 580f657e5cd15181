"""Blocks of models whose layers all have a window.

vLLM 0.26 gives layers with a window the smallest blocks that their backend names, which would be of one token here. It
scales them to the blocks of layers without a window, if there are any; a model that has none would keep them.
"""

from __future__ import annotations

import weakref
from typing import Any

_newest: list[weakref.ref[Any]] = []  # the configuration of the layers that were made last


def note(config: Any) -> None:
    """vLLM asks for sizes later, without a current configuration."""
    _newest[:] = [weakref.ref(config)]


def sizes() -> list[int]:
    """The size that the user chose, if all layers with a cache have a window. vLLM prefers it to any multiple of 1."""
    config = _newest[0]() if _newest else None
    if config is None:
        return []
    layers = config.compilation_config.static_forward_context.values()
    windows = [getattr(layer, "sliding_window", None) for layer in layers if hasattr(layer, "get_kv_cache_spec")]
    return [config.cache_config.block_size] if windows and all(windows) else []
