"""The plans of one step of a group of layers, which vLLM hands to each of them as attention metadata."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from ...plugin.parts import Part


@dataclasses.dataclass
class Step:
    """vLLM's attention metadata. vLLM itself reads and writes `slot_mapping` for cross attention."""

    num_actual_tokens: int
    slot_mapping: torch.Tensor
    parts: tuple[Part, ...]
    common: Any  # vLLM's CommonAttentionMetadata, from which the step was planned
    plan_again: Callable[[], object] | None  # plans the lengths that are then on the device; None: the host planned

    @property
    def causal(self) -> bool:
        """A drafter of vLLM whose rows see later tokens checks that this is False; so it is if requests differ."""
        return not isinstance(self.common.causal, torch.Tensor) and bool(self.common.causal)
