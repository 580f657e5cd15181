"""The attention's view of a step (ForwardBatch) and of a layer (AttentionLayer)."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import torch

from .transfer import moved


class ForwardMode(enum.Enum):
    """The kind of a step, by its new tokens."""

    DECODE = "decode"  # one new token a request
    EXTEND = "extend"  # any number a request, causal: prompts, chunks of prompts, decodes among them
    VERIFY = "verify"  # a tree of guesses a request; each guess sees its ancestors


@dataclasses.dataclass(frozen=True)
class AttentionLayer:
    """One attention layer of the model. Head counts are this rank's (flashpage.parallel divides heads)."""

    index: int  # number in the token pool
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    sm_scale: float | None = None  # None: head_dim ** -0.5
    window_left: int = -1  # tokens visible left of the row's own; -1: all
    logits_soft_cap: float = 0.0  # 0: none
    is_cross: bool = False  # attends to the encoder's tokens, not to the decoder's
    k_scale: Any = None  # numbers or fp32 tensors that multiply the pool's values
    v_scale: Any = None
    v_head_dim: int | None = None  # latent rows (MLA): V is the first columns of K; None: V has a head dim of its own


@dataclasses.dataclass(frozen=True)
class ForwardBatch:
    """The tensors of one step. Lengths stay on the host, where plans are made; all others are where the model runs."""

    mode: ForwardMode
    tokens: torch.Tensor  # [new tokens] int32; -1 - i: the i-th that the step before computes, until forward
    positions: torch.Tensor  # [new tokens] int32, within their requests
    out_slots: torch.Tensor  # [new tokens] int32, where their K and V go
    rows: torch.Tensor  # [batch] int32, of the request table
    seq_lens: torch.Tensor  # [batch] int32, host: tokens of each request, the new ones included
    new_lens: torch.Tensor  # [batch] int32, host: new tokens of each request
    tree_mask: torch.Tensor | None = None  # VERIFY: each request's new x seq_lens truth values, flattened and joined
    encoder_lens: torch.Tensor | None = None  # [batch] int32, host: tokens of the encoder, in front of the decoder's
    encoder_slots: torch.Tensor | None = None  # int32: where K and V of cross layers go, in steps that write them

    @property
    def batch_size(self) -> int:
        """Number of requests."""
        return len(self.seq_lens)

    def to(self, device: torch.device) -> ForwardBatch:
        """A copy with all tensors but the lengths on `device`, in one transfer. The host's is complete on return."""
        names = ("tokens", "positions", "out_slots", "rows")
        found: dict[str, Any] = dict(zip(names, moved([getattr(self, name) for name in names], device), strict=True))
        runs_on = device.type != "cpu"  # work on a stream waits for the copy; the host must wait explicitly
        for name in ("tree_mask", "encoder_slots"):
            if (tensor := getattr(self, name)) is not None:
                found[name] = tensor.to(device, non_blocking=runs_on)
        return dataclasses.replace(self, **found)
