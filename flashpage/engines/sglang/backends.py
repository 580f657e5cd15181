"""The backend for a model: one class for K and V, one for latent rows."""

from __future__ import annotations

from typing import Any

from .backend import FlashpageBackend
from .planner import NO_BRANCHES, Branches
from .support import has_latent_rows


def backend_of(runner: Any, branches: Branches = NO_BRANCHES) -> FlashpageBackend:
    """Makes the backend of a model runner."""
    if not has_latent_rows(runner.model_config):
        return FlashpageBackend(runner, branches)
    from .latent import FlashpageLatentBackend

    return FlashpageLatentBackend(runner, branches)
