"""flash-attn's options of scores and masks as plan arguments."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import torch

from ...base import checks
from ...base.errors import CapabilityError, RunError
from ...kernels.options import check_window
from ...variants.variant import Variant

_MOST_VARIANTS = 32
_local = threading.local()  # this thread's variants: plans compare them by identity, so equal options must have one


class Scores(NamedTuple):
    """Arguments that change scores or hide tokens."""

    softmax_scale: float | None
    causal: bool
    window_size: Any
    softcap: float
    alibi_slopes: torch.Tensor | None

    def arguments(self, batch: int, heads: int, *, has_one_row: bool) -> dict[str, Any]:
        """Keywords of a plan without sm_scale; `has_one_row`: each request has one row, which sees no later tokens."""
        if self.alibi_slopes is not None:
            _check_slopes(self.alibi_slopes, batch, heads)
        left, right = _window(self.window_size)
        causal = checks.flag("causal", self.causal, RunError) or right == 0
        later = -1 if causal or has_one_row else right
        if self.softmax_scale is not None:
            checks.real("softmax_scale", self.softmax_scale, error=RunError)
        cap = checks.real("softcap", self.softcap, error=RunError)
        given: dict[str, Any] = {"window_left": left, "logits_soft_cap": cap}
        if not has_one_row:
            given["causal"] = causal
        variant = _variant(self.alibi_slopes, later)
        return given if variant is None else given | {"own": {"variant": variant}}


def _window(window_size: Any) -> tuple[int, int]:
    try:
        left, right = window_size
    except (TypeError, ValueError):
        raise RunError(f"window_size={checks.shown(window_size)}: pass (left, right), -1 for no limit.") from None
    left, right = (checks.whole("window_size", side, -(2**31), error=RunError) for side in (left, right))
    return check_window(left), check_window(right)


def _variant(slopes: torch.Tensor | None, later: int) -> Variant | None:
    """ALiBi with the caller's slopes, and a window to the right; None without both."""
    if slopes is None and later < 0:
        return None
    key = (None if slopes is None else id(slopes)), later
    known: dict[Any, Variant] = _local.__dict__.setdefault("variants", {})
    found = known.get(key)
    if found is None:
        while len(known) >= _MOST_VARIANTS:
            del known[next(iter(known))]
        found = known[key] = Variant(**_logit(slopes), **_mask(slopes, later))
    return found


def _check_slopes(slopes: Any, batch: int, heads: int) -> None:
    shape = checks.tensor(slopes, "alibi_slopes", RunError).shape
    if shape not in ((heads,), (batch, heads)) or slopes.dtype != torch.float32:
        raise RunError(
            f"alibi_slopes has shape {tuple(shape)} and dtype {slopes.dtype}: "
            f"pass float32, [{heads}] or [{batch}, {heads}], heads or batch and heads."
        )


def _logit(slopes: torch.Tensor | None) -> dict[str, Any]:
    if slopes is None:
        return {}
    slope = "slopes[h]" if slopes.dim() == 1 else "slopes[b, h]"
    return {"logit": f"score - {slope} * abs(kv_idx - q_idx)", "tensors": {"slopes": slopes}}


def _mask(slopes: torch.Tensor | None, later: int) -> dict[str, Any]:
    return {} if later < 0 else {"mask": "kv_idx <= q_idx + later", "scalars": {"later": later}}


def refuse_training(dropout_p: float, **tensors: Any) -> None:
    """Refuses dropout, gradients, and arguments that are no tensors, by name."""
    if checks.real("dropout_p", dropout_p, error=RunError) != 0:
        raise CapabilityError(f"dropout_p={dropout_p} is not supported, as this is inference alone: pass 0.")
    for name, tensor in tensors.items():
        checks.tensor(tensor, name, RunError)
