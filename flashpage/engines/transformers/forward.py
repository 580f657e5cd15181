"""The attention function for transformers' AttentionInterface."""

from __future__ import annotations

from typing import Any

import torch

from ...base.errors import RunError
from . import batching, masks, ragged
from .cache_layer import layer_of
from .call import Layer, judge
from .latents import NewRows


@torch.compiler.disable
def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer of a transformers model.

    Args:
        query: [batch, num_q_heads, q_length, head_dim].
        key, value: [batch, num_kv_heads, kv_length, head_dim or head_dim_vo]; from a PagedCache, only the new tokens.
        attention_mask: the result of padding_mask, or the user's 4-D mask.
        scaling: multiplies the scores; None: head_dim ** -0.5.
        sliding_window: number of tokens that a row sees, its own included.
        softcap: scores become softcap * tanh(score / softcap).
        s_aux: [num_q_heads] sinks in natural-log units, which join the softmax's denominator.
        indices: [batch, q_length, topk], the tokens that each row sees (DeepSeek V3.2, GLM-5), all different and
            without padding. Rows in a PagedCache are read by them. Without one they become a mask of bits: each layer
            makes a plan, and the time is that of all tokens.
        cache, cu_seq_lens_q, cu_seq_lens_k, read_index, write_index: given by continuous batching.

    Returns:
        [batch, q_length, num_q_heads, head_dim_vo], and None in place of the attention weights.
    """
    options = {"dropout": dropout, "scaling": scaling, "sliding_window": sliding_window, "softcap": softcap}
    options |= {"s_aux": s_aux, "is_causal": is_causal, "position_bias": position_bias} | kwargs
    layer = judge(module, query, key, value, attention_mask, options)
    pages = layer_of(key)
    if (indices := kwargs.get("indices")) is not None:
        is_latent = isinstance(pages, NewRows)
        if batching.is_step(kwargs) or (pages is not None and not is_latent):
            raise RunError(
                "indices are given, the tokens that rows see, over pages of keys and values: "
                "pass no past_key_values, and call generate in place of generate_batch."
            )
        if layer.window_left >= 0:
            raise RunError(
                f"sliding_window={sliding_window} with indices: pass None, as rows list the tokens they see."
            )
        if is_latent:
            return pages.attend(masks.without_bits(layer), query, key, value, indices), None
        layer = _of_lists(layer, indices, query.shape[2], key.shape[2])
    if batching.is_step(kwargs):
        of_module = {"config": getattr(module, "config", None)}
        return batching.attend(layer, module.layer_idx, query, key, value, of_module | kwargs), None
    if pages is not None:
        return pages.attend(layer, query, key, value), None
    if attention_mask is None and (q_ends := kwargs.get("cu_seq_lens_q")) is not None:
        kv_ends = kwargs.get("cu_seq_lens_k")
        if query.shape[0] != 1:
            raise RunError(f"cu_seq_lens_q with a batch of {query.shape[0]}: join the requests in one row.")
        return ragged.packed(layer, query, key, value, (q_ends, q_ends if kv_ends is None else kv_ends)), None
    return ragged.attend(layer, query, key, value), None


def _of_lists(layer: Layer, indices: torch.Tensor, q_length: int, kv_length: int) -> Layer:
    """The layer with a mask of the listed tokens, which has the causal mask and the padding in it."""
    mask = masks.of_lists(indices, layer.mask, q_length, kv_length, layer.call.is_causal)
    return layer._replace(call=layer.call._replace(has_mask=True), mask=mask)


def batched_attention(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    """`attention` for models that a ContinuousBatchingManager runs, which get no masks."""
    if not batching.is_step(kwargs):
        raise RunError("the model runs under continuous batching: stop the manager before you call the model.")
    return attention(*args, **kwargs)
