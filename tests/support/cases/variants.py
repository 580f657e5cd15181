"""Users' variants for the case table, each as a user writes it and as torch evaluates it for the reference.

A builder takes a device and returns the arguments of flashpage.Variant with captured tensors on that device, and the
two callables that the reference evaluates with broadcast index tensors; a Python variant is its own reference.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

MAX_REQUESTS, MAX_TOKENS, MAX_HEADS = 8, 512, 16  # extents of the captured tensors: cases with variants stay below


@dataclasses.dataclass(frozen=True)
class BuiltVariant:
    arguments: dict[str, Any]  # of flashpage.Variant
    score_mod: Callable[..., Any] | None
    mask_mod: Callable[..., Any] | None


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


def _python(score_mod: Callable[..., Any] | None = None, mask_mod: Callable[..., Any] | None = None) -> BuiltVariant:
    arguments = {"score_mod": score_mod, "mask_mod": mask_mod}
    return BuiltVariant({name: mod for name, mod in arguments.items() if mod is not None}, score_mod, mask_mod)


def tensor_bias(device: str) -> BuiltVariant:
    """A dense bias by head and both positions."""
    bias = _random(MAX_HEADS, MAX_TOKENS, MAX_TOKENS).to(device)
    return _python(lambda score, b, h, q_idx, kv_idx: score + bias[h, q_idx, kv_idx])


def head_gain(device: str) -> BuiltVariant:
    """A vector by head and a scalar."""
    gain, shift = (1 + 0.3 * _random(MAX_HEADS)).to(device), 0.25
    return _python(lambda score, b, h, q_idx, kv_idx: score * gain[h] - shift)


def distance_penalty(device: str) -> BuiltVariant:
    """torch functions and a branch: far tokens weigh less."""

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        distance = q_idx - kv_idx
        return torch.where(distance > 8, score - torch.log(1.0 + torch.abs(distance)), score)

    return _python(score_mod)


def documents(device: str) -> BuiltVariant:
    """A document mask: tokens see only their own document."""
    lengths = torch.tensor([[37, 5, 64, 1, 405], [128, 128, 128, 64, 64], [511, 1, 0, 0, 0], [3, 9, 100, 200, 200]])
    ids = torch.stack([torch.repeat_interleave(torch.arange(5), row) for row in lengths])
    document = ids.repeat(MAX_REQUESTS // 4, 1).to(torch.int32).to(device)  # [request, position]
    return _python(mask_mod=lambda b, h, q_idx, kv_idx: document[b, q_idx] == document[b, kv_idx])


def head_windows(device: str) -> BuiltVariant:
    """Each head sees its own number of tokens back, and a few ahead."""
    reach = (torch.arange(MAX_HEADS) * 37 % 200).to(torch.int32).to(device)
    return _python(mask_mod=lambda b, h, q_idx, kv_idx: (q_idx - kv_idx < reach[h]) & (kv_idx - q_idx < 20))


def rows_that_see_nothing(device: str) -> BuiltVariant:
    """Most rows see nothing, in whole blocks; the others do not see the middle."""
    return _python(
        mask_mod=lambda b, h, q_idx, kv_idx: (q_idx % 64 < 3) & (q_idx > 80) & ((kv_idx < 30) | (kv_idx > 290))
    )


def blocks_and_gain(device: str) -> BuiltVariant:
    """Two callables: integer arithmetic in the mask, the request's factor in the score."""
    factor = (1 + 0.2 * _random(MAX_REQUESTS)).to(device)
    return _python(
        lambda score, b, h, q_idx, kv_idx: score * factor[b],
        lambda b, h, q_idx, kv_idx: ((q_idx // 32) == (kv_idx // 32)) | (kv_idx % 7 < 2),
    )


def expression(device: str) -> BuiltVariant:
    """C++ expressions with a captured tensor and a scalar; the reference uses equal torch callables."""
    gain, limit = (1 + 0.3 * _random(MAX_HEADS)).to(device), 40
    host_gain = gain.cpu()
    arguments = {
        "logit": "score * gain[h]",
        "mask": "q_idx - kv_idx < limit",
        "tensors": {"gain": gain},
        "scalars": {"limit": limit},
    }
    return BuiltVariant(
        arguments,
        lambda score, b, h, q_idx, kv_idx: score * host_gain[h],
        lambda b, h, q_idx, kv_idx: q_idx - kv_idx < limit,
    )


VARIANTS: dict[str, Callable[[str], BuiltVariant]] = {
    builder.__name__: builder
    for builder in (
        tensor_bias,
        head_gain,
        distance_penalty,
        documents,
        head_windows,
        rows_that_see_nothing,
        blocks_and_gain,
        expression,
    )
}
