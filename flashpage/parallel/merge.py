"""Merges attention states over a process group: one collective, then the merge kernel in rank order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..base.errors import PlanError, RunError
from ..wrappers import operators
from ..wrappers.lse_mode import BASE_2, LN_2, LOG2_E, is_natural
from ..wrappers.merge import check_states

HEADS = ("all", "own")
_ALIGNMENT = 16  # bytes, of each state and of the LSEs after it

Shape = tuple[int, int, int]  # rows, heads, head_dim


class StateGroup:
    """Merges states over a process group, for the same rows: each rank has the state over its own tokens.

    heads="all": states are gathered, and every rank merges all heads. heads="own": each rank gets and merges only its
    share of the heads, the rank-th run of neighbouring ones, and 1 / world_size of the bytes move. A reduce-scatter of
    weighted outputs would need a second collective for the weights, and would add in an order that NCCL chooses.
    """

    def __init__(self, group: Any, heads: str) -> None:
        if heads not in HEADS:
            raise PlanError(f"heads={heads!r} is unknown: pass 'all' or 'own'.")
        self.group = group
        self.rank, self.world_size = rank_and_size(group)
        self._is_own = heads == "own"

    def out_shape(self, shape: Shape) -> Shape:
        """Shape of the merged output, from the shape of a rank's state."""
        rows, num_heads, dim = shape
        if not self._is_own:
            return shape
        if num_heads % self.world_size:
            raise RunError(
                f"heads='own' does not divide {num_heads} heads among {self.world_size} ranks: pass heads='all'."
            )
        return rows, num_heads // self.world_size, dim

    def merge(
        self, write: Callable[[torch.Tensor, torch.Tensor], object], shape: Shape, out: torch.Tensor, lse: torch.Tensor
    ) -> None:
        """Merges: `write(out, lse)` writes this rank's state to the send buffer; the result goes to `out` and `lse`.

        Args:
            shape: shape of the rank's state.
            out, lse: contiguous, of `out_shape(shape)` and its rows and heads.
        """
        import torch.distributed as dist

        part = self.out_shape(shape)
        received = _memory(self.world_size, part, out)
        if self._is_own:
            state, state_lse = out.new_empty(shape), lse.new_empty(shape[:2])
            write(state, state_lse)
            sent = _memory(self.world_size, part, out)
            states, lses = _views(sent, part, out.dtype)
            states.copy_(state.unflatten(1, (self.world_size, part[1])).transpose(0, 1))
            lses.copy_(state_lse.unflatten(1, (self.world_size, part[1])).transpose(0, 1))
            dist.all_to_all_single(received, sent, group=self.group)
        else:
            sent = _memory(1, part, out)
            states, lses = _views(sent, part, out.dtype)
            write(states[0], lses[0])
            gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # renamed in torch 2.13
            gather(received, sent, group=self.group)
        states, lses = _views(received, part, out.dtype)
        operators.call("merge_states_into", states.transpose(0, 1), lses.transpose(0, 1), out, lse)


def merge_over_group(
    out: torch.Tensor, lse: torch.Tensor, group: Any = None, *, heads: str = "all", lse_mode: str = BASE_2
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges the states of all ranks of a group; makes any wrapper's `run(..., return_lse=True)` context parallel.

    Every rank merges the same bytes in the same order with the same kernel, so results are bitwise equal on all ranks.
    All ranks call it with the same shapes.

    Args:
        out: [rows, num_heads, head_dim], this rank's output over its own tokens.
        lse: [rows, num_heads] fp32, base 2; -inf where a row sees no token here. Sinks belong to one rank's state only.
        group: a torch.distributed process group (NCCL for CUDA tensors, gloo for the CPU's); None: the default one.
        heads: "all", or "own": the merged heads of this rank alone, [rows, num_heads / world_size, head_dim].
        lse_mode: "base2", or "basee": LSEs are natural logarithms (two small launches more).

    Returns:
        The merged output and LSE, contiguous.
    """
    check_states(out, lse, "out", "lse", 3)
    natural = is_natural(lse_mode)
    states = StateGroup(group, heads)
    shape: Any = tuple(out.shape)
    merged = out.new_empty(states.out_shape(shape))
    merged_lse = lse.new_empty(merged.shape[:2])

    def write(to: torch.Tensor, lse_to: torch.Tensor) -> None:
        to.copy_(out)
        torch.mul(lse, LOG2_E, out=lse_to) if natural else lse_to.copy_(lse)

    if merged.numel():
        states.merge(write, shape, merged, merged_lse)
    return (merged, merged_lse.mul_(LN_2)) if natural else (merged, merged_lse)


def rank_and_size(group: Any) -> tuple[int, int]:
    """This process's rank in a group, and the group's ranks."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        raise PlanError(
            f"group={group!r}: torch.distributed has no process group: call torch.distributed.init_process_group first."
        )
    try:
        rank = dist.get_rank(group)
    except (RuntimeError, ValueError, TypeError, KeyError, AttributeError):
        raise PlanError(f"group={group!r} is no process group: pass one of torch.distributed, or None.") from None
    if rank < 0:
        raise PlanError(
            f"group={group!r} does not have this process (rank {dist.get_rank()}): pass a group that it belongs to."
        )
    return rank, dist.get_world_size(group)


def _memory(states: int, shape: Shape, like: torch.Tensor) -> torch.Tensor:
    """A byte buffer [states, bytes] with out and lse of each state in one piece, so that one collective moves them."""
    out_bytes, lse_bytes = _sizes(shape, like.dtype)
    return torch.empty((states, out_bytes + lse_bytes), dtype=torch.uint8, device=like.device)


def _views(memory: torch.Tensor, shape: Shape, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of such bytes as [states, rows, heads, head_dim] and [states, rows, heads]."""
    rows, num_heads, dim = shape
    out_bytes, _ = _sizes(shape, dtype)
    out = memory[:, : rows * num_heads * dim * dtype.itemsize].view(dtype)
    lse = memory[:, out_bytes : out_bytes + rows * num_heads * 4].view(torch.float32)
    return out.unflatten(1, shape), lse.unflatten(1, shape[:2])


def _sizes(shape: Shape, dtype: torch.dtype) -> tuple[int, int]:
    rows, num_heads, dim = shape
    return _aligned(rows * num_heads * dim * dtype.itemsize), _aligned(rows * num_heads * 4)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
