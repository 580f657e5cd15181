"""Registers our attention and mask functions with transformers."""

from __future__ import annotations

import functools
from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface

from .forward import attention, batched_attention
from .masks import padding_mask

# The name has no "flash" in it: transformers takes such names for FlashAttention and loads that package.
NAME = "fpage"
# The name while a ContinuousBatchingManager runs the model. It has no mask function, so transformers makes no mask.
BATCHING_NAME = "fpage_batching"
_MARK = "_keeps_flashpage"


def register() -> None:
    """Makes NAME an `attn_implementation` of every model that goes through transformers' attention interface."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, padding_mask)
    AttentionInterface.register(BATCHING_NAME, batched_attention)
    _admit_to_batching()


def _admit_to_batching() -> None:
    """Lets models keep NAME in `generate_batch`, which replaces or refuses implementations that it does not know."""
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

    choose = ContinuousBatchingManager.switch_to_cb_friendly_attn
    if getattr(choose, _MARK, False):
        return

    @functools.wraps(choose)
    def choose_or_keep(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        if model.config._attn_implementation != NAME:
            return choose(self, model, *args, **kwargs)
        model.set_attn_implementation(BATCHING_NAME)
        self._original_attn_impl = NAME  # `stop` restores it
        return None

    setattr(choose_or_keep, _MARK, True)
    ContinuousBatchingManager.switch_to_cb_friendly_attn = choose_or_keep
