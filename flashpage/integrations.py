"""Parts for an engine of one's own: everything between a model's layers and the wrappers' plan and run."""

from .serving.backend import AttentionBackend
from .serving.drafts import DraftSteps
from .serving.forward_batch import AttentionLayer, ForwardBatch, ForwardMode
from .serving.gather import gather_slots
from .serving.graph_runner import GraphRunner, batch_sizes_to_capture
from .serving.kv_parts import KvPart
from .serving.paged_attention import PagedAttention
from .serving.token_pool import RequestTable, TokenPool
from .serving.trees import tree_mask

__all__ = [
    "AttentionBackend",
    "AttentionLayer",
    "DraftSteps",
    "ForwardBatch",
    "ForwardMode",
    "GraphRunner",
    "KvPart",
    "PagedAttention",
    "RequestTable",
    "TokenPool",
    "batch_sizes_to_capture",
    "gather_slots",
    "tree_mask",
]
