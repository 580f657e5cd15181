"""Registers our attention and mask functions with transformers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface
from transformers.generation.continuous_batching import initialization
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

from ...base.errors import RunError
from ...base.warn import warn
from .forward import attention, batched_attention
from .masks import padding_mask

# The name has no "flash" in it: transformers takes such names for FlashAttention and loads that package.
NAME = "fpage"
# Whether continuous batching keeps every name with its prefix (5.17), or only names that it knows (5.23).
_KEEPS_PREFIXED = "paged|sdpa" in AttentionInterface().valid_keys()
# The name while a ContinuousBatchingManager runs the model. It has no mask function, so transformers makes no mask.
BATCHING_NAME = f"paged|{NAME}" if _KEEPS_PREFIXED else f"{NAME}_batching"
_MARK = "_keeps_flashpage"
# Whether the model whose manager is being made is on a card. `_choose` notes it for `_capture_decodes_alone`, as the
# function of transformers that chooses graphs does not get the model.
_is_on_card: ContextVar[bool] = ContextVar("_is_on_card", default=False)


def register() -> None:
    """Makes NAME an `attn_implementation` of every model that goes through transformers' attention interface."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, padding_mask)
    AttentionInterface.register(BATCHING_NAME, batched_attention)
    if not _KEEPS_PREFIXED:
        _wrap(ContinuousBatchingManager, "switch_to_cb_friendly_attn", _choose)
    if hasattr(initialization, "ATTN_TYPE_TO_ALLOCATOR"):
        _wrap(initialization, "ensure_decode_fast_path_is_available", _keep_tables)
    else:  # 5.17, which has no block tables for NAME
        _wrap(ContinuousBatchingManager, "__init__", _refuse_graphs)


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
    """Gives decode steps block tables, which transformers keeps for names of FlashAttention, and captures no others."""
    if config._attn_implementation != BATCHING_NAME:
        return original(config, cb_config, user_requested)
    kinds = initialization.group_layers_by_attn_type(config)
    if not all(initialization.ATTN_TYPE_TO_ALLOCATOR[kind].supports_block_table for kind in kinds):
        cb_config.max_blocks_per_request = 0
    _capture_decodes_alone(cb_config, _is_on_card.get())
    _is_on_card.set(False)  # it was noted for this manager alone
    return None


def _capture_decodes_alone(cb_config: Any, is_on_card: bool) -> None:
    """Chooses graphs before transformers does, which would capture all steps if a size of padding is given. If the user
    has not chosen, decodes are captured on a card, and a step is prepared while the one before it runs, which is what
    transformers does for FlashAttention."""
    chosen = cb_config.use_cuda_graph
    if chosen is None:
        padding = ("q_padding_interval_size", "kv_padding_interval_size")
        has_padding = any(getattr(cb_config, name) != initialization.FALLBACK_DEFAULTS[name] for name in padding)
        is_compiled = getattr(cb_config, "decode_compile_config", None) is not None  # perhaps with graphs of its own
        wants_graphs = has_padding or (is_on_card and not is_compiled)
    else:
        prompts, wants_graphs = cb_config.cuda_graph_booleans
        if prompts and not isinstance(chosen, bool):
            warn(f"use_cuda_graph={chosen}: steps with prompts run without a graph, as the host plans their lengths")
    captures = wants_graphs and cb_config.max_blocks_per_request > 0
    cb_config.use_cuda_graph = (False, captures)
    if captures and getattr(cb_config, "use_async_batching", False) is None:
        cb_config.use_async_batching = True


def _refuse_graphs(original: Callable[..., Any], manager: Any, model: Any, *args: Any, **kwargs: Any) -> None:
    """Refuses graphs of steps with prompts before the manager has a request. transformers has chosen by then, from
    use_cuda_graph, the sizes of padding and the device."""
    original(manager, model, *args, **kwargs)
    chosen = manager.continuous_batching_config.cuda_graph_booleans
    if model.config._attn_implementation != BATCHING_NAME or not chosen[0]:
        return
    if manager._original_attn_impl is not None:
        model.set_attn_implementation(manager._original_attn_impl)
    raise RunError(
        f"use_cuda_graph={chosen}, from ContinuousBatchingConfig or its sizes of padding: "
        "this version of transformers would capture steps with prompts, whose lengths the host plans. "
        "Pass use_cuda_graph=False, or install transformers 5.18 or newer, which captures decode steps alone."
    )
