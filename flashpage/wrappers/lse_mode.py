"""The base of an LSE. Kernels write base 2, as FlashInfer's do; several engines merge natural logarithms."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..base import checks
from ..base.errors import RunError

BASE_2, BASE_E = "base2", "basee"
LSE_BASES = {"log2": BASE_2, "ln": BASE_E}  # FlashInfer's `lse_base` of its prefill wrappers
LN_2, LOG2_E = math.log(2), 1 / math.log(2)


def is_natural(lse_mode: Any) -> bool:
    """Whether LSEs are natural logarithms; raises for anything but the two modes."""
    if lse_mode.__class__ is not str or lse_mode not in (BASE_2, BASE_E):
        raise RunError(f"lse_mode={checks.shown(lse_mode)} is unknown: pass 'base2' or 'basee'.")
    return bool(lse_mode == BASE_E)


def mode_of(lse_base: Any, lse_mode: Any) -> str:
    """The mode that FlashInfer's `lse_base` names; only one of the two arguments may differ from its default."""
    mode = LSE_BASES.get(lse_base) if lse_base.__class__ is str else None
    if mode is None:
        raise RunError(f"lse_base={checks.shown(lse_base)} is unknown: pass 'log2' or 'ln'.")
    if is_natural(mode) and lse_mode != BASE_2:
        raise RunError(f"lse_base={lse_base!r} and lse_mode={lse_mode!r} are both given: pass one of them.")
    return mode if mode == BASE_E else lse_mode


def in_base_e(result: Any, lse: torch.Tensor | None) -> Any:
    """The result of a run after its LSE, which was returned or given, was multiplied by ln 2 in place.

    Rows of `lse` that the run did not write are multiplied too.
    """
    written = result[1] if result.__class__ is tuple else lse
    if written is not None:
        written.mul_(LN_2)
    return result
