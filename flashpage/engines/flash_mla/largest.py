"""FlashMLA's max_logits: the largest score of each row of q and head, computed by torch where a caller reads it.

No kernel writes these numbers, and engines do not read them; programs do that watch or clip scores in training.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from ...base.errors import RunError
from ...base.memory import is_capturing
from ...wrappers.lse_mode import LN_2
from .sparse import Lists

_MOST_ELEMENTS = 1 << 24  # of the tokens that are gathered at a time
_NEAR, _RELATIVE = 2**-5, 2**-10  # LSEs of equal inputs differ by less on every kernel, without Maxima.rounding
_ROUNDING = 2**-24  # of fp32, for each product of a score, relative to the product of the norms of q and K


class Maxima(NamedTuple):
    """The largest score of each row of q and head, and numbers that check the scores; all [rows, heads]."""

    largest: torch.Tensor  # -inf without tokens
    lse: torch.Tensor  # natural logarithms; -inf without tokens
    rounding: torch.Tensor  # how far kernels may round a score: its products may be far larger than their sum


class Scores(NamedTuple):
    """The inputs from which the scores of a call are computed."""

    query: torch.Tensor  # [rows, heads, columns]
    lists: Lists  # its cache is [tokens, 1, columns]
    sm_scale: float
    lse: torch.Tensor  # [rows, heads], to base 2, which the caller does not have

    def maxima(self) -> Maxima:
        rows, topk = self.lists.indices.shape
        tokens = self.lists.cache.squeeze(1)
        empty = torch.full((3, *self.query.shape[:2]), -torch.inf, dtype=torch.float32, device=tokens.device)
        found = Maxima(*empty)
        if topk == 0:
            return found
        step = max(1, _MOST_ELEMENTS // (topk * tokens.shape[1]))
        for begin in range(0, rows, step):
            part = slice(begin, begin + step)
            scores, found.rounding[part] = self._of_rows(part, tokens)
            found.largest[part], found.lse[part] = scores.amax(-1), scores.logsumexp(-1)
        return found

    def _of_rows(self, rows: slice, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores [rows, heads, topk] in fp32, -inf where a list has no token, and their rounding [rows, heads]."""
        indices = self.lists.indices[rows]
        hidden = indices < 0
        if self.lists.lengths is not None:
            entries = torch.arange(indices.shape[1], device=indices.device)
            hidden |= entries >= self.lists.lengths[rows, None]
        query, read = self.query[rows].float(), tokens[indices.clamp(min=0).long()].float()
        scores = torch.einsum("rhd,rtd->rht", query, read) * self.sm_scale
        longest = read.norm(dim=-1).masked_fill_(hidden, 0).amax(-1, keepdim=True)  # entries without a token may be NaN
        rounding = query.norm(dim=-1) * longest * (abs(self.sm_scale) * query.shape[-1] * _ROUNDING)
        return scores.masked_fill_(hidden.unsqueeze(1), -torch.inf), rounding


class MaxLogits(torch.Tensor):
    """A tensor [rows, heads] of fp32 whose numbers are computed by the first operation that reads them; shape, type
    and device are known before. Until then it keeps q and kv, which must not be written to."""

    _scores: Scores | None
    _value: torch.Tensor
    _unit: float
    _versions: tuple[int, ...]
    _is_captured: bool

    @staticmethod
    def __new__(cls, scores: Scores, unit: float) -> MaxLogits:
        """The maxima of the scores times `unit`."""
        shape, device = scores.query.shape[:2], scores.query.device
        found: MaxLogits = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32, device=device)
        found._scores, found._unit, found._versions = scores, unit, _versions_of(scores)
        found._is_captured = is_capturing(device)
        return found

    def computed(self) -> torch.Tensor:
        """The numbers, in a tensor of torch's own class; each call returns the same one."""
        scores = self._scores
        if scores is not None:
            device = scores.query.device.type
            with torch.inference_mode(False), torch.no_grad(), torch.autocast(device, enabled=False):
                found = self._checked(scores)
                if not self._is_captured:
                    _compare(found, scores.lse * LN_2)
                self._value, self._scores = found.largest * self._unit, None
        return self._value

    def _checked(self, scores: Scores) -> Maxima:
        if is_capturing(scores.query.device) != self._is_captured:
            was, now = ("in", "outside of") if self._is_captured else ("outside of", "in")
            raise RunError(
                f"max_logits of a call {was} a CUDA graph is read {now} it: read it where the call is, such as by "
                "max_logits.clone()."
            )
        if _versions_of(scores) != self._versions:
            raise _written()
        return scores.maxima()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _OF_SHAPE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return func(*_computed(args), **_computed(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's declaration lacks the function
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Operations that do not come from Python."""
        return func(*_computed(args), **_computed(kwargs or {}))


_OF_SHAPE = frozenset(
    {
        *(getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "layout", "ndim", "is_cuda")),
        *(getattr(torch.Tensor, name).__get__ for name in ("is_cpu", "requires_grad")),
        *(torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.nelement, torch.Tensor.__len__),
        *(torch.Tensor.stride, torch.Tensor.is_contiguous, torch.Tensor.element_size, torch.Tensor.is_floating_point),
    }
)


def _computed(given: Any) -> Any:
    return pytree.tree_map_only(MaxLogits, MaxLogits.computed, given)


def _versions_of(scores: Scores) -> tuple[int, ...]:
    """How often torch has seen the inputs written; it does not count in inference mode."""
    given = scores.query, scores.lists.cache
    return tuple(-1 if tensor.is_inference() else tensor._version for tensor in given)


def _compare(found: Maxima, expected: torch.Tensor) -> None:
    """Refuses scores of other inputs than the call's, whose LSEs are known: torch does not see all writes."""
    margin = _NEAR + _RELATIVE * expected.abs() + found.rounding
    differs = (found.lse - expected).abs() > margin  # False if one is no number
    if bool(differs.any()):
        raise _written()


def _written() -> RunError:
    return RunError(
        "q or kv was written between flash_mla_sparse_fwd and the first use of its max_logits, which is computed then: "
        "use max_logits before, such as by max_logits.clone()."
    )
