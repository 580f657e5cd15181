"""Windows of generated tokens (R-SWA, Unlimited-OCR): a row sees its request's whole prompt, and of the tokens after it
those of a window. A mask reads where each prompt ends.

vLLM frees the blocks between prompt and window, and their entries in the block table become its block of zeros, whose
tokens the mask hides too.
"""

from __future__ import annotations

from typing import Any

import torch

from ....variants.variant import Variant
from ...plugin.layers import LayerOptions

_WHOLE = 2**31 - 1  # of a request whose prompt is not known


class ReferenceWindows:
    """The tokens of each request's prompt, in memory that captured steps read."""

    def __init__(self, window: int, max_requests: int, device: torch.device) -> None:
        self._prompts = torch.full((max_requests,), _WHOLE, dtype=torch.int32, device=device)
        self.variant = Variant(
            mask=f"kv_idx <= q_idx && (kv_idx < prompts[b] || q_idx - kv_idx < {window})",
            tensors={"prompts": self._prompts},
        )

    def take(self, prompts: torch.Tensor | None) -> None:
        """Takes a step's prompts, [requests]; None: a step by which vLLM warms up."""
        if prompts is None:
            self._prompts.fill_(_WHOLE)
        else:
            self._prompts[: len(prompts)].copy_(prompts, non_blocking=True)


def window_of(spec: Any) -> int | None:
    """The window of a group of layers, by vLLM's specification of their cache; None: they see all tokens."""
    found: int | None = getattr(spec, "rswa_window", None)
    return found


def _has_windows(config: Any) -> bool:
    return getattr(getattr(config, "model_config", None), "rswa_window", None) is not None


def refusals(config: Any, is_batch_invariant: bool) -> list[str]:
    """The reasons why such a model cannot be served with other parts of vLLM's configuration."""
    if not _has_windows(config):
        return []
    ranks = getattr(config.parallel_config, "decode_context_parallel_size", 1)
    return [
        f"flashpage: windows of generated tokens (R-SWA) are not served with {what}"
        for is_unserved, what in (
            (ranks > 1, "decode context parallelism"),
            (getattr(config.parallel_config, "use_ubatching", False), "steps in two halves, as vLLM drops the prompts"),
            (is_batch_invariant, "batch invariance, as masked steps have another kernel"),
        )
        if is_unserved
    ]


def refusal(config: Any, layer: LayerOptions, is_batch_invariant: bool) -> str | None:
    """The reason why a layer cannot be served by that configuration; None: it can. The CPU's platform of vLLM asks
    nothing else."""
    if layer.is_encoder or not _has_windows(config):
        return None
    found = refusals(config, is_batch_invariant)
    if layer.kind.slopes:
        found.append("flashpage: windows of generated tokens (R-SWA) are not served with ALiBi")
    return f"{found[0]}. Choose another attention backend." if found else None
