"""Random weights for an engine's model; a module of its own, as the engine's processes import it."""

from __future__ import annotations

import zlib
from typing import Any

import torch


def draw_weights(model: Any) -> None:
    """Random weights, the same for each backend, large enough for attention to decide the next token."""
    for name, parameter in sorted(model.named_parameters()):
        if parameter.dim() < 2:
            parameter.data.fill_(1.0)
            continue
        generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(name.encode()))
        gain = parameter.shape[-1] ** 0.5 if "embed" in name else 1.4 if "qkv_proj" in name else 1.0
        for rows in parameter.data.split(4096):
            drawn = torch.randn(rows.shape, generator=generator, device=rows.device, dtype=torch.float32)
            rows.copy_(drawn * (gain / parameter.shape[-1] ** 0.5))
    for module in model.modules():  # latent layers keep factors of their weights
        if hasattr(module, "kv_b_proj") and hasattr(module, "process_weights_after_loading"):
            module.process_weights_after_loading(next(model.parameters()).dtype)
