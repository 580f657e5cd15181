"""The engine's side of attention: what lies between a model's layers and the wrappers' plan and run.

* gather          page numbers of a batch, out of a table of slots: one kernel, and its CPU twin
* token_pool      the two levels: request -> slots (RequestTable), slots -> K and V (TokenPool)
* forward_batch   a step as attention sees it, and what a layer asks of it
* kv_parts        which tokens of its requests a layer sees: all, a window, its own, the encoder's
* indices         those parts as CSR page tables
* backend         AttentionBackend: metadata once a step, forward once a layer
* paged_attention PagedAttention: the backend of this library
* graph_wrappers  its wrappers for captured steps
* trees           masks of speculative tokens
* drafts          steps of a draft model, planned together
* graph_runner    captured decode steps by batch size
"""

from .backend import AttentionBackend
from .drafts import DraftSteps
from .forward_batch import AttentionLayer, ForwardBatch, ForwardMode
from .gather import gather_slots
from .graph_runner import GraphRunner, batch_sizes_to_capture
from .kv_parts import KvPart
from .paged_attention import PagedAttention
from .token_pool import RequestTable, TokenPool
from .trees import tree_mask

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
