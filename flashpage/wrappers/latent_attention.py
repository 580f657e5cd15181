"""An Attention over latent rows, whose callers have q and the cache in several forms."""

from __future__ import annotations

from typing import Any

import torch
from torch._C import _len_torch_dispatch_stack
from torch.compiler import is_dynamo_compiling

from ..base.kv_view import Cache
from ..kernels.options import RunOptions
from ..run.checks import NO_SCALES, Scales, Tensors
from .base import Attention
from .latent_run import joined_query, latent_cache_of


class LatentAttention(Attention):
    """Runs get q and the cache as one tensor each, or as the pair of their columns (latent_run.py, one_form)."""

    def run(  # with all of its parameters by name: packing and unpacking them would take a fifth of the call
        self,
        q: Any,
        cache: Any,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        values: RunOptions | None = None,
        scales: Scales = NO_SCALES,
        sinks: torch.Tensor | None = None,
        enable_pdl: bool | None = None,
        *,
        q_tail: torch.Tensor | None = None,
    ) -> Any:
        """As Attention.run. A pair is passed to C as it is; C checks that q's second tensor lies where it lay when it
        was bound."""
        lacks_part = (q.__class__ is tuple and (q[0] is None or q[1] is None)) or (
            cache.__class__ is tuple and cache[1] is None
        )
        if lacks_part or is_dynamo_compiling() or _len_torch_dispatch_stack():  # is_traced would be a frame more
            q, cache = self._for_kernels(q, cache)  # which refuses a missing part; packed rows have one
        elif q.__class__ is tuple:
            q, q_tail = q
        return Attention.run(self, q, cache, out, lse, return_lse, values, scales, sinks, enable_pdl, q_tail=q_tail)

    def _for_kernels(self, q: Any, cache: Any) -> tuple[torch.Tensor, Cache]:
        """The tensors as kernels read them: one of queries, and one cache or two of which the second has columns. Given
        such tensors it returns these very objects."""
        options = self._configured  # None before the first plan
        return joined_query(options, q), latent_cache_of(options, cache)

    def _run_judged(
        self,
        values: RunOptions,
        tensors: Tensors,
        return_lse: bool,
        scales: Scales,
        sinks: torch.Tensor | None,
        enable_pdl: bool | None,
        q_tail: torch.Tensor | None = None,
    ) -> Any:
        given, cache, out, lse = tensors
        q, read = self._for_kernels(given if q_tail is None else (given, q_tail), cache)
        if q is given and read is cache:
            return super()._run_judged(values, tensors, return_lse, scales, sinks, enable_pdl)
        # The tensors as kernels read them may fit the bound structs although the caller's did not.
        result = super().run(q, read, out, lse, return_lse, values, scales, sinks, enable_pdl)
        is_in_place = type(given) is torch.Tensor and given.data_ptr() == q.data_ptr()
        reads_tail = q_tail is None or q_tail.numel() > 0
        if is_in_place and reads_tail and type(read) is type(cache) and not self.session.first_row:
            # From here on C compares the caller's tensors. If they cannot be bound, no tensor fits, and the next run is
            # judged again.
            written = result if return_lse else (result, lse)
            k, v = cache if isinstance(cache, tuple) else (cache, None)
            self._bind_tensors(self._local.bound.address, given, k, v, *written, 0, None, None, q_tail)
        return result
