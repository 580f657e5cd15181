"""Cascade attention: levels of tokens that requests share, and the merging of attention states."""

from .cascade_levels import MultiLevelCascadeAttentionWrapper
from .cascade_prefix import (
    BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
    BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
)
from .merge import merge_state, merge_state_in_place, merge_states

__all__ = [
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
]
