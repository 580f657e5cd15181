"""Which tokens of a request a layer sees: each part in use has its own wrapper and page table."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..base.errors import CapabilityError
from .forward_batch import AttentionLayer, ForwardBatch


class KvPart(enum.Enum):
    """A part of the tokens in a request's row of the table."""

    ALL = "all"
    WINDOW = "window"  # from the page where the first new token's window begins
    OWN = "own"  # the decoder's, after the encoder's
    ENCODER = "encoder"


class Span(NamedTuple):
    """A part of each request in a batch, [batch] int32 on the host."""

    starts: torch.Tensor | None  # tokens before it, multiples of the page size; None: none
    lens: torch.Tensor  # tokens


def parts_of(layers: Sequence[AttentionLayer]) -> dict[KvPart, AttentionLayer]:
    """The parts that a model's layers see. The first layer of each part provides the options of its plans."""
    has_cross = any(layer.is_cross for layer in layers)
    found: dict[KvPart, AttentionLayer] = {}
    for layer in layers:
        found.setdefault(part_of(layer, has_cross), layer)
    windows = {layer.window_left for layer in layers if layer.window_left >= 0}
    if has_cross and windows:
        raise CapabilityError(f"window_left={min(windows)} with cross attention is not supported: pass -1.")
    if len(windows) > 1:
        raise CapabilityError(f"window_left is {sorted(windows)} in different layers: pass one window for all.")
    return found


def part_of(layer: AttentionLayer, has_cross: bool) -> KvPart:
    """The part of a layer, in a model with or without cross attention."""
    if has_cross:
        return KvPart.ENCODER if layer.is_cross else KvPart.OWN
    return KvPart.ALL if layer.window_left < 0 else KvPart.WINDOW


def span_of(part: KvPart, batch: ForwardBatch, window_left: int, page_size: int) -> Span:
    """The tokens of a part in each row of the table."""
    if part is KvPart.WINDOW:
        first_new = batch.seq_lens - batch.new_lens
        starts = (first_new - window_left).clamp(min=0) // page_size * page_size
        return Span(starts, batch.seq_lens - starts)
    if part is KvPart.ALL:
        return Span(None, batch.seq_lens)
    if batch.encoder_lens is None:
        raise CapabilityError("encoder_lens=None: pass it in every batch of a model with cross attention.")
    if part is KvPart.ENCODER:
        return Span(None, batch.encoder_lens)
    return Span(-(-batch.encoder_lens // page_size) * page_size, batch.seq_lens)  # the decoder's tokens begin on a page
