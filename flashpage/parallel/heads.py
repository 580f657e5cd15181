"""Tensor parallel attention: which heads a rank computes."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ..base import checks
from ..base.errors import PlanError, RunError


@dataclasses.dataclass(frozen=True)
class HeadShare:
    """The heads of one rank. Cut per-head tensors with its slices: `sinks[share.qo]`, `k_scale[share.kv]`."""

    num_qo_heads: int  # of this rank, as its plans take them
    num_kv_heads: int
    qo: slice  # of the model's query heads
    kv: slice  # of the model's KV heads
    total_qo_heads: int
    total_kv_heads: int
    kv_replicas: int  # ranks that hold the same KV heads: more than 1 if there are fewer KV heads than ranks

    def queries(self, q: torch.Tensor) -> torch.Tensor:
        """A view of this rank's heads in queries or outputs of all heads, [..., total_qo_heads, head_dim]."""
        _check_heads(checks.tensor(q, "q", RunError), "q", -2, self.total_qo_heads)
        return q[..., self.qo, :]

    def cache(self, paged_kv_cache: Any, kv_layout: str = "NHD") -> Any:
        """Views of this rank's heads in a cache of all heads, one tensor or (k, v).

        Its last dimensions are tokens, heads, head_dim (HND: heads, tokens, head_dim).
        """
        axis = -2 if checks.layout(kv_layout) == "NHD" else -3
        if isinstance(paged_kv_cache, tuple | list):
            return tuple(self.cache(part, kv_layout) for part in paged_kv_cache)
        cache = checks.tensor(paged_kv_cache, "paged_kv_cache", RunError)
        _check_heads(cache, "paged_kv_cache", axis, self.total_kv_heads)
        return cache.narrow(axis, self.kv.start, self.num_kv_heads)


def head_share(num_qo_heads: int, num_kv_heads: int, rank: int, world_size: int) -> HeadShare:
    """The heads of one rank of a tensor parallel group, divided as vLLM and SGLang do.

    Rank r has the r-th run of neighbouring query heads and the KV heads that they read. If there are fewer KV heads
    than ranks, `kv_replicas` neighbouring ranks hold each of them. `pos_encoding_mode="ALIBI"` computes slopes from the
    head count of a plan, which is wrong for a share: capture `alibi_slopes[share.qo]` in a Variant instead.

    Args:
        num_qo_heads, num_kv_heads: head counts of the model.
        rank: this process's rank in the group.
        world_size: number of ranks in the group.
    """
    world_size = checks.whole("world_size", world_size, 1)
    rank = checks.whole("rank", rank, 0, world_size - 1)
    num_qo_heads = checks.whole("num_qo_heads", num_qo_heads, 1)
    num_kv_heads = checks.whole("num_kv_heads", num_kv_heads, 1)
    if num_qo_heads % num_kv_heads:
        raise PlanError(
            f"num_qo_heads={num_qo_heads} is not a multiple of num_kv_heads={num_kv_heads}: pass the model's own."
        )
    if num_qo_heads % world_size:
        raise PlanError(
            f"num_qo_heads={num_qo_heads} is not a multiple of world_size={world_size}. "
            f"Pass a number of ranks that divides {num_qo_heads}; use further ranks for context or data parallelism."
        )
    if num_kv_heads % world_size and world_size % num_kv_heads:
        raise PlanError(
            f"num_kv_heads={num_kv_heads} and world_size={world_size}: neither is a multiple of the other. "
            f"Pass a number of ranks that divides {num_kv_heads} or is a multiple of it."
        )
    qo, kv = num_qo_heads // world_size, max(1, num_kv_heads // world_size)
    first_kv = rank * num_kv_heads // world_size
    return HeadShare(
        num_qo_heads=qo,
        num_kv_heads=kv,
        qo=slice(rank * qo, (rank + 1) * qo),
        kv=slice(first_kv, first_kv + kv),
        total_qo_heads=num_qo_heads,
        total_kv_heads=num_kv_heads,
        kv_replicas=max(1, world_size // num_kv_heads),
    )


def _check_heads(tensor: torch.Tensor, name: str, axis: int, heads: int) -> None:
    if tensor.dim() < -axis or tensor.shape[axis] != heads:
        raise RunError(
            f"{name} has shape {tuple(tensor.shape)}: dimension {axis} must have all {heads} heads. "
            "A tensor of this rank's own heads needs no cutting."
        )
