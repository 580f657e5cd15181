"""An Attention over latent rows, whose callers have q and the cache in several forms."""

from __future__ import annotations

import torch

from ..run.binding import Binding
from ..run.checks import Tensors
from .base import Attention
from .latent_run import joined_query, latent_cache_of


class LatentAttention(Attention):
    """Runs get q and the cache as one tensor each, or as the pair of their columns (latent_run.py, one_form)."""

    def _plain(self, given: Tensors) -> Tensors:
        """The queries as one tensor, and one cache, or two of which the second has columns."""
        q = joined_query(self._configured, given.q)
        return given._replace(q=q, cache=latent_cache_of(self._configured, given.cache))

    def _bind_given(self, bound: Binding, given: Tensors, plain: Tensors) -> None:
        first, tail = given.q if isinstance(given.q, tuple) else (given.q, None)
        if type(first) is torch.Tensor and first.data_ptr() == plain.q.data_ptr():  # otherwise plain.q is a copy
            k, v = given.cache if isinstance(given.cache, tuple) else (given.cache, None)
            self._bind_tensors(bound.address, first, k, v, plain.out, plain.lse, 0, None, None, tail)
