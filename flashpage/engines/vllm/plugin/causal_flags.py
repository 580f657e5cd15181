"""Steps in which some requests are causal and the rows of others see their whole request, as vLLM's diffusion models
have them: a mask reads which is which."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ....variants.variant import Variant
from ...plugin.layers import LayerOptions


class CausalFlags:
    """Whether each request is causal, in memory that captured steps read."""

    def __init__(self, max_requests: int, device: torch.device) -> None:
        self._flags = torch.ones(max_requests, dtype=torch.int32, device=device)
        self.variant = Variant(mask="(causal[b] == 0) || (kv_idx <= q_idx)", tensors={"causal": self._flags})

    def take(self, flags: torch.Tensor) -> None:
        """Takes a step's flags, [requests]."""
        self._flags[: len(flags)].copy_(flags)


def canvas_of(config: Any) -> int:
    """Rows of a request in a diffusion model's steps; 0: another model."""
    diffusion = getattr(config, "diffusion_config", None)
    return 0 if diffusion is None else diffusion.canvas_length or 0


def flags_of(
    config: Any, layers: Sequence[LayerOptions], max_requests: int, device: torch.device
) -> CausalFlags | None:
    """The flags of a group of a diffusion model's layers; None: another model, or layers that cannot be served so."""
    if getattr(config, "diffusion_config", None) is None:
        return None
    # Rows that are not causal see all later tokens of their canvas, which a shorter window would hide.
    longest = canvas_of(config)
    windows = [layer.values[False].window_left for layer in layers]
    is_served = all(window < 0 or window + 1 >= longest for window in windows)
    return CausalFlags(max_requests, device) if is_served and not any(layer.kind.slopes for layer in layers) else None
