"""More than one card: heads of a tensor parallel rank, and attention over a context that is spread over ranks."""

from __future__ import annotations

from .context import ContextParallelAttention
from .heads import HeadShare, head_share
from .layout import ContextLayout, LocalPages
from .merge import merge_over_group

__all__ = [
    "ContextLayout",
    "ContextParallelAttention",
    "HeadShare",
    "LocalPages",
    "head_share",
    "merge_over_group",
]
