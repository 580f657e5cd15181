"""Steps in which some requests are causal and the rows of others see their whole request, as vLLM's diffusion models
have them: a mask reads which is which."""

from __future__ import annotations

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


def flags_of(config: Any, max_requests: int, device: torch.device) -> CausalFlags | None:
    """The flags of a group of layers; None: the model has no steps that need them."""
    return None if getattr(config, "diffusion_config", None) is None else CausalFlags(max_requests, device)


def refusal(config: Any, layer: LayerOptions, context_ranks: int = 1) -> str | None:
    """The reason why a layer cannot be served whose rows may see later tokens by vLLM's configuration; None: it can."""
    if layer.is_encoder:
        return None
    window = layer.values[False].window_left + 1  # 0: all tokens
    if getattr(config, "diffusion_config", None) is not None:
        canvas = canvas_of(config)
        for is_unserved, what in (
            (bool(layer.kind.slopes), "ALiBi"),
            (context_ranks > 1, "decode context parallelism"),
            (0 < window < canvas, f"windows shorter than the canvas of {canvas} tokens (here {window})"),
        ):
            if is_unserved:
                return (
                    f"flashpage has no {what} in diffusion models, whose steps have causal requests next to others. "
                    "Choose another attention backend."
                )
    drafts = getattr(getattr(config, "speculative_config", None), "num_speculative_tokens", None) or 0
    sees_later = getattr(getattr(config, "attention_config", None), "use_non_causal", False)
    if sees_later and 0 < window <= drafts:
        return (
            f"flashpage: with {drafts} drafts a request has {drafts + 1} rows that see later tokens too, some of which "
            f"a window of {window} tokens would hide. Draft fewer tokens."
        )
    return None
