"""The reference of the demo: the same model with torch's own attention, unpaged, one request at a time."""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..serving.request import Request
from .model import Llama

# Steps of the largest logit by which rounding alone moves logits. In bf16 eight layers move the most moved one of 8,192
# by 17 in the median and by 34 at most (300 random tokens, next to fp32); a wrong context moves it by some 100.
ROUNDINGS = 32


@dataclasses.dataclass(frozen=True)
class Verdict:
    """How the generated tokens compare with the reference's, given the same tokens before them."""

    agree: int  # equal to the reference's arg max
    ties: int  # the reference's logit of the token is within rounding of its maximum
    wrong: int

    @property
    def total(self) -> int:
        return self.agree + self.ties + self.wrong


def causal_attention(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """Attention over one whole request; q [rows, num_q_heads, head_dim], k and v [rows, num_kv_heads, head_dim]."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=scale)[0].transpose(0, 1)


def check_tokens(model: Llama, requests: list[Request]) -> Verdict:
    """Runs each request in one pass, and compares each generated token with the arg max at its position."""
    agree = ties = wrong = 0
    for request in requests:
        if not request.generated:
            continue
        tokens = torch.tensor(request.tokens, device=model.device)
        positions = torch.arange(len(tokens) - 1, device=model.device)
        attend = functools.partial(causal_attention, scale=model.config.sm_scale)
        hidden = model.forward(tokens[:-1], positions, attend)
        logits = model.logits(hidden[request.prompt_len - 1 :])
        chosen = tokens[request.prompt_len :]
        best, best_token = logits.max(-1)
        gap = best - logits.gather(1, chosen[:, None])[:, 0]
        same = chosen == best_token
        rounding = ROUNDINGS * torch.finfo(model.dtype).eps * logits.abs().amax(-1)
        near = ~same & (gap <= rounding)
        agree, ties = agree + int(same.sum()), ties + int(near.sum())
        wrong += int((~same & ~near).sum())
    return Verdict(agree, ties, wrong)
