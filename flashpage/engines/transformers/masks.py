"""Turns transformers' masks into arguments of plans: padding becomes lengths, any other mask becomes bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

from ...base.errors import RunError
from ...plan.page_indices import Mask
from .call import Layer

_PADDING = "_flashpage_padding"  # attribute of a 4-D causal mask: the mask [batch, kv_length] that is in it, or None


def padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    local_size: int | None = None,
    config: Any = None,
    **kwargs: Any,
) -> torch.Tensor | None:
    """The mask function for transformers' AttentionMaskInterface.

    Returns:
        None (no padding) or [batch, kv_length] bool where the mask is full, or causal with at most a window;
        [batch, 1, q_length, kv_length] bool for any other mask, and for a causal one of a model that reads its mask
        itself; that one remembers the padding.
    """
    is_full = mask_function is bidirectional_mask_function
    if isinstance(q_offset, torch.Tensor) or (not is_full and kv_offset + kv_length > q_offset + q_length):
        raise RunError(
            "the cache hands out more tokens than it has (StaticCache): pass flashpage.hf.PagedCache or none."
        )
    is_window = local_size is None or local_size == getattr(config, "sliding_window", None)
    padding = None if attention_mask is None else attention_mask[:, -kv_length:]
    if is_full or (allow_is_causal_skip and is_window):
        return padding
    arguments = {"mask_function": mask_function, "attention_mask": attention_mask, "local_size": local_size} | kwargs
    arguments |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    mask = sdpa_mask(batch_size, q_length, kv_length, q_offset, kv_offset, **arguments)
    if mask_function is causal_mask_function and local_size is None:
        setattr(mask, _PADDING, padding)
    return mask


def without_bits(layer: Layer) -> Layer:
    """The layer with the padding alone in place of a 4-D causal mask that padding_mask has made; otherwise the same."""
    if not hasattr(layer.mask, _PADDING):
        return layer
    return layer._replace(call=layer.call._replace(has_mask=False), mask=getattr(layer.mask, _PADDING))


class Rows(NamedTuple):
    """Which rows of a padded batch [batch, length] are tokens."""

    is_token: torch.Tensor | None  # [batch, length] bool on the host; None: all
    places: torch.Tensor | None  # rows of the flattened batch that are tokens, on the device; None: all
    lengths: torch.Tensor  # [batch], on the host

    def pack(self, padded: torch.Tensor) -> torch.Tensor:
        """[batch, heads, length, dim] -> [tokens, heads, dim], a view where it can be one."""
        rows = padded.transpose(1, 2).flatten(0, 1)
        return rows if self.places is None else rows.index_select(0, self.places)

    def unpack(self, rows: torch.Tensor, length: int) -> torch.Tensor:
        """[tokens, heads, dim] -> [batch, length, heads, dim], zeros where there is no token."""
        batch = self.lengths.numel()
        if self.places is not None:
            padded = rows.new_zeros(batch * length, *rows.shape[1:])
            rows = padded.index_copy_(0, self.places, rows)
        return rows.view(batch, length, *rows.shape[1:])


def all_rows(batch: int, length: int) -> Rows:
    return Rows(None, None, torch.full((batch,), length, device="cpu"))


def token_rows(is_token: torch.Tensor, device: torch.device) -> Rows:
    """Rows for a mask on the host, [batch, length]."""
    if bool(is_token.all()):
        return all_rows(*is_token.shape)
    index = is_token.flatten().nonzero().squeeze(1).to(device)
    return Rows(is_token, index, is_token.sum(1))


def check_lists(indices: torch.Tensor, q_length: int, kv_length: int) -> None:
    """Refuses lists of another shape, and on the CPU tokens that a request does not have."""
    if indices.dim() != 3 or indices.shape[1] != q_length:
        raise RunError(f"indices has shape {tuple(indices.shape)}: pass [batch, {q_length}, topk].")
    if indices.is_cpu and indices.numel():  # on a card the host would have to wait for them; gathers assert there
        least, most = int(indices.min()), int(indices.max())
        if least < 0 or most >= kv_length:
            raise RunError(
                f"indices has {most if most >= kv_length else least} but each request has {kv_length} tokens: "
                f"pass tokens from 0 to {kv_length - 1}, without padding."
            )


def of_lists(
    indices: torch.Tensor, mask: torch.Tensor | None, q_length: int, kv_length: int, is_causal: bool
) -> torch.Tensor:
    """The 4-D mask of rows that list their tokens; `mask`: as padding_mask gives it, and is kept."""
    check_lists(indices, q_length, kv_length)
    found = torch.zeros(indices.shape[0], 1, q_length, kv_length, dtype=torch.bool, device=indices.device)
    found.scatter_(-1, indices.unsqueeze(1).long(), True)
    if mask is not None and mask.dim() == 4:
        return found & _visible(mask)
    if is_causal:
        found = found.tril(kv_length - q_length)
    return found if mask is None else found & mask[:, None, None, :].bool()


def bits(mask: torch.Tensor | None, batch: int, q_length: int, kv_length: int) -> Mask | None:
    """A 4-D mask as `plan` takes it; None for other masks."""
    if mask is None or mask.dim() != 4:
        return None
    return Mask(visible_of(mask, batch, q_length, kv_length).flatten())


def visible_of(mask: torch.Tensor, batch: int, q_length: int, kv_length: int) -> torch.Tensor:
    """A 4-D mask as truth values, [batch, 1, q_length, kv_length]."""
    if mask.shape[1] != 1 or mask.shape[0] not in (1, batch) or mask.shape[2:] != (q_length, kv_length):
        raise RunError(
            f"attention_mask has shape {tuple(mask.shape)}: pass one for all heads, {(batch, 1, q_length, kv_length)}."
        )
    return _visible(mask).expand(batch, 1, q_length, kv_length)


def _visible(mask: torch.Tensor) -> torch.Tensor:
    """A 4-D mask as truth values."""
    if mask.dtype == torch.bool:
        return mask
    visible = mask == 0
    if not bool((visible | (mask <= torch.finfo(mask.dtype).min / 2)).all()):
        raise RunError("attention_mask adds numbers to the scores: pass a bool mask.")
    return visible
