"""Our names in transformers' registries."""

from __future__ import annotations

import functools
from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface

from .forward import attention, batched_attention
from .masks import padding_mask

# transformers takes every name with "flash" in it for FlashAttention, and loads that package.
NAME = "fpage"
# The same while a ContinuousBatchingManager runs the model: under a name without a mask function no mask is made.
BATCHING_NAME = "fpage_batching"
_MARK = "_keeps_flashpage"


def register() -> None:
    """Makes NAME an `attn_implementation` of every model that goes through transformers' attention interface."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, padding_mask)
    AttentionInterface.register(BATCHING_NAME, batched_attention)
    _admit_to_batching()


def _admit_to_batching() -> None:
    """`generate_batch` replaces or refuses implementations that it does not know; models that have ours keep it."""
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

    choose = ContinuousBatchingManager.switch_to_cb_friendly_attn
    if getattr(choose, _MARK, False):
        return

    @functools.wraps(choose)
    def choose_or_keep(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        if model.config._attn_implementation != NAME:
            return choose(self, model, *args, **kwargs)
        model.set_attn_implementation(BATCHING_NAME)
        self._original_attn_impl = NAME  # what `stop` gives the model back
        return None

    setattr(choose_or_keep, _MARK, True)
    ContinuousBatchingManager.switch_to_cb_friendly_attn = choose_or_keep
