"""Registers our attention and mask functions with transformers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.generation.continuous_batching import initialization
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

from ..plugin.versions import warn_if_untested
from . import prompts
from .forward import attention, batched_attention
from .masks import padding_mask

# The name has no "flash" in it: transformers takes such names for FlashAttention and loads that package.
NAME = "fpage"
# Whether continuous batching keeps every name with its prefix (5.17), or only names that it knows (5.23).
_KEEPS_PREFIXED = "paged|sdpa" in AttentionInterface().valid_keys()
# The name while a ContinuousBatchingManager runs the model. It has no mask function, so transformers makes no mask.
BATCHING_NAME = f"paged|{NAME}" if _KEEPS_PREFIXED else f"{NAME}_batching"
_MARK = "_keeps_flashpage"
# Whether the model whose manager is being made is on a card. `_choose` notes it for `_choose_graphs`: the function of
# transformers that chooses graphs does not get the model.
_is_on_card: ContextVar[bool] = ContextVar("_is_on_card", default=False)


def register() -> None:
    """Makes NAME an `attn_implementation` of every model that goes through transformers' attention interface. Warns if
    it was not tested with this version of transformers."""
    warn_if_untested("transformers", transformers.__version__)
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, padding_mask)
    AttentionInterface.register(BATCHING_NAME, batched_attention)
    if not _KEEPS_PREFIXED:
        _wrap(ContinuousBatchingManager, "switch_to_cb_friendly_attn", _choose)
    if hasattr(initialization, "ATTN_TYPE_TO_ALLOCATOR"):
        _wrap(initialization, "ensure_decode_fast_path_is_available", _keep_tables)


def _wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Puts `wrapper(original, *arguments)` in the place of a function, once."""
    original = getattr(owner, name)
    if getattr(original, _MARK, False):
        return

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(wrapped, _MARK, True)
    setattr(owner, name, wrapped)


def _choose(original: Callable[..., Any], manager: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Lets models keep NAME in `generate_batch`, which replaces or refuses implementations that it does not know."""
    _is_on_card.set(model.device.type == "cuda")
    if model.config._attn_implementation != NAME:
        return original(manager, model, *args, **kwargs)
    model.set_attn_implementation(BATCHING_NAME)
    manager._original_attn_impl = NAME  # `stop` restores it
    return None


def _keep_tables(original: Callable[..., Any], config: Any, cb_config: Any, user_requested: bool) -> None:
    """Gives decode steps block tables, which transformers keeps for names of FlashAttention, and chooses graphs."""
    if config._attn_implementation != BATCHING_NAME:
        return original(config, cb_config, user_requested)
    kinds = initialization.group_layers_by_attn_type(config)
    if not all(initialization.ATTN_TYPE_TO_ALLOCATOR[kind].supports_block_table for kind in kinds):
        cb_config.max_blocks_per_request = 0
    if _has_graphs():  # otherwise transformers turns them off, with a warning if the user has chosen them
        _choose_graphs(cb_config, _is_on_card.get())
    prompts.capture(config, _has_graphs() and cb_config.cuda_graph_booleans[0])
    _is_on_card.set(False)  # it was noted for this manager alone
    return None


def _has_graphs() -> bool:
    name = getattr(initialization, "get_accelerator_graph_name", None)
    return torch.cuda.is_available() if name is None else name() is not None


def _choose_graphs(cb_config: Any, is_on_card: bool) -> None:
    """Chooses graphs before transformers does, which knows no attention without masks but FlashAttention. A choice of
    the user's stays, and so does a size of padding, which means graphs of all steps. Otherwise decodes are captured on
    a card. With graphs a step is prepared while the one before it runs, as transformers does for FlashAttention."""
    if cb_config.use_cuda_graph is not None:
        of_prompts, of_decodes = cb_config.cuda_graph_booleans
    else:
        padding = ("q_padding_interval_size", "kv_padding_interval_size")
        of_prompts = any(getattr(cb_config, name) != initialization.FALLBACK_DEFAULTS[name] for name in padding)
        is_compiled = getattr(cb_config, "decode_compile_config", None) is not None  # perhaps with graphs of its own
        of_decodes = of_prompts or (is_on_card and not is_compiled)
    of_decodes = of_decodes and cb_config.max_blocks_per_request > 0
    cb_config.use_cuda_graph = (of_prompts, of_decodes)
    if (of_prompts or of_decodes) and getattr(cb_config, "use_async_batching", False) is None:
        cb_config.use_async_batching = True
