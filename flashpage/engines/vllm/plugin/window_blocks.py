"""The tokens of a cache block in models whose layers all have a window.

vLLM 0.26 gives a layer with a window the smallest block that its backend supports, which is of one token here. If a
model also has layers without a window, vLLM enlarges these blocks to those of the other layers. If it has none, the
blocks would stay at one token, whatever --block-size says.
"""

from __future__ import annotations

import weakref
from typing import Any

_newest: list[weakref.ref[Any]] = []  # the configuration of the layers that were made last


def note(config: Any) -> None:
    """Remembers the configuration, because vLLM has no current one when it calls `sizes`."""
    _newest[:] = [weakref.ref(config)]


def sizes() -> list[int]:
    """The block size that the user chose, if all layers with a cache have a window; else nothing. The backend lists it
    before the multiples of 1, and vLLM prefers it."""
    config = _newest[0]() if _newest else None
    if config is None:
        return []
    layers = config.compilation_config.static_forward_context.values()
    windows = [getattr(layer, "sliding_window", None) for layer in layers if hasattr(layer, "get_kv_cache_spec")]
    return [config.cache_config.block_size] if windows and all(windows) else []
