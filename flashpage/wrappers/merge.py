"""Merges attention states (outputs over some of the tokens, with their LSEs) into one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..base import checks
from ..base.errors import RunError
from ..run.checks import NO_SCALES, Scales, check_output
from . import operators
from .lse_mode import BASE_2, LN_2, LOG2_E, in_base_e, is_natural

if TYPE_CHECKING:
    from ..kernels.options import RunOptions
    from .base import Attention

__all__ = ["merge_parts", "merge_state", "merge_state_in_place", "merge_states", "part_of"]

Part = Callable[[torch.Tensor, torch.Tensor | None], object]  # writes a state over some of the tokens to (out, lse)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def merge_state(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor, *, lse_mode: str = BASE_2
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges two states.

    Args:
        v_a, v_b: [rows, num_heads, head_dim], outputs; the same strides, last dimension contiguous.
        s_a, s_b: [rows, num_heads] fp32, their LSEs, base 2.
        lse_mode: "base2", or "basee": LSEs are natural logarithms (a few small launches more).

    Returns:
        The merged output and LSE, contiguous.
    """
    _check_pair(v_a, s_a, v_b, s_b, ("v_a", "s_a", "v_b", "s_b"))
    if is_natural(lse_mode):
        return in_base_e(operators.call("merge_state", v_a, s_a * LOG2_E, v_b, s_b * LOG2_E), None)
    return operators.call("merge_state", v_a, s_a, v_b, s_b)


def merge_state_in_place(
    v: torch.Tensor,
    s: torch.Tensor,
    v_other: torch.Tensor,
    s_other: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    lse_mode: str = BASE_2,
) -> None:
    """Merges a second state into the first one.

    Args:
        v, s: [rows, num_heads, head_dim] and [rows, num_heads] fp32, contiguous, written.
        v_other, s_other: the other state, the same shapes.
        mask: [rows] bool or uint8, the rows to merge; None: all.
        lse_mode: "base2", or "basee": LSEs are natural logarithms (a few small launches more).
    """
    _check_pair(v, s, v_other, s_other, ("v", "s", "v_other", "s_other"))
    for name, tensor in (("v", v), ("s", s)):
        if not tensor.is_contiguous():
            raise RunError(
                f"{name} has strides {tuple(tensor.stride())}: pass a contiguous tensor, as it is written in place."
            )
    if mask is not None:
        checks.tensor(mask, "mask", RunError)
        checks.same_device(mask, v.device, "mask", RunError)
        if mask.shape != v.shape[:1] or mask.dtype not in (torch.bool, torch.uint8):
            raise RunError(
                f"mask has shape {tuple(mask.shape)} and dtype {mask.dtype}: "
                f"pass one bool or uint8 for each row, [{v.shape[0]}]."
            )
    if not is_natural(lse_mode):
        operators.call("merge_state_in_place", v, s, v_other, s_other, mask)
        return
    merged = s * LOG2_E
    operators.call("merge_state_in_place", v, merged, v_other, s_other * LOG2_E, mask)
    merged.mul_(LN_2)
    s.copy_(merged if mask is None else torch.where(mask.bool().unsqueeze(1), merged, s))


def merge_states(v: torch.Tensor, s: torch.Tensor, *, lse_mode: str = BASE_2) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges any number of states.

    Args:
        v: [rows, num_states, num_heads, head_dim], outputs.
        s: [rows, num_states, num_heads] fp32, their LSEs, base 2.
        lse_mode: "base2", or "basee": LSEs are natural logarithms (a few small launches more).

    Returns:
        The merged output [rows, num_heads, head_dim] and LSE [rows, num_heads], contiguous.
    """
    check_states(v, s, "v", "s", 4)
    if v.shape[1] < 1:
        raise RunError(
            f"v has shape {tuple(v.shape)}: pass at least one state, [rows, num_states, num_heads, head_dim]."
        )
    if is_natural(lse_mode):
        return in_base_e(operators.call("merge_states", v, s * LOG2_E), None)
    return operators.call("merge_states", v, s)


def part_of(
    attention: Attention,
    q: torch.Tensor,
    cache: Any,
    values: RunOptions | None = None,
    scales: Scales = NO_SCALES,
) -> Part:
    """Runs the attention of one part."""
    return lambda out, lse: attention.run(q, cache, out, lse, values=values, scales=scales)


def merge_parts(parts: Sequence[Part], out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Attention in parts over disjoint tokens, merged in one pass; one part alone writes to out and lse itself.

    Args:
        parts: at least one.
        out: [rows, num_heads, head_dim], written; contiguous where there are several parts.
        lse: [rows, num_heads] fp32, contiguous, written; None: not needed.
    """
    if len(parts) == 1:
        parts[0](out, lse)
        return
    if not out.is_contiguous():
        raise RunError(
            f"out has strides {tuple(out.stride())}: pass a contiguous tensor, as parts are merged in place."
        )
    if lse is None:
        lse = out.new_empty(out.shape[:2], dtype=torch.float32)
    if len(parts) == 2:
        other, other_lse = torch.empty_like(out), torch.empty_like(lse)
        parts[0](other, other_lse)
        parts[1](out, lse)
        operators.call("merge_state_in_place", out, lse, other, other_lse, None)
        return
    check_output(lse, "lse", tuple(out.shape[:2]), torch.float32, out.device)  # no part writes to it
    states, lses = out.new_empty((len(parts), *out.shape)), lse.new_empty((len(parts), *lse.shape))
    for i, part in enumerate(parts):
        part(states[i], lses[i])
    operators.call("merge_states_into", states.transpose(0, 1), lses.transpose(0, 1), out, lse)


def _check_pair(
    v: torch.Tensor, s: torch.Tensor, v_other: torch.Tensor, s_other: torch.Tensor, names: tuple[str, str, str, str]
) -> None:
    check_states(v, s, names[0], names[1], 3)
    check_states(v_other, s_other, names[2], names[3], 3)
    if v_other.shape != v.shape or v_other.dtype != v.dtype:
        raise RunError(
            f"{names[2]} has shape {tuple(v_other.shape)} and dtype {v_other.dtype} but {names[0]} has "
            f"{tuple(v.shape)} and {v.dtype}: pass equal shapes and types."
        )
    checks.same_device(v_other, v.device, names[2], RunError)


def check_states(v: torch.Tensor, s: torch.Tensor, v_name: str, s_name: str, dims: int) -> None:
    """Checks `v` of `dims` dimensions and one LSE for each row and head, of types that can be merged."""
    for name, tensor in ((v_name, v), (s_name, s)):
        checks.tensor(tensor, name, RunError)
    if v.dim() != dims:
        shape = "[rows, num_heads, head_dim]" if dims == 3 else "[rows, num_states, num_heads, head_dim]"
        raise RunError(f"{v_name} has shape {tuple(v.shape)}: pass {shape}.")
    if v.dtype not in _DTYPES:
        raise RunError(f"{v_name} has dtype {v.dtype}: pass float32, float16 or bfloat16.")
    if s.shape != v.shape[:-1] or s.dtype != torch.float32:
        raise RunError(
            f"{s_name} has shape {tuple(s.shape)} and dtype {s.dtype}: "
            f"pass one float32 LSE for each row and head of {v_name}, {tuple(v.shape[:-1])}."
        )
    if v.device.type not in ("cpu", "cuda"):
        raise RunError(f"{v_name} is on {v.device}: pass tensors on the CPU or on a CUDA device.")
    checks.same_device(s, v.device, s_name, RunError)
