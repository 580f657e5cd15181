"""`flashinfer.attention`: batches of prefill and decode together, and attention sinks."""

from .wrappers.mixed_batch import BatchAttention
from .wrappers.sinks import BatchAttentionWithAttentionSinkWrapper

__all__ = ["BatchAttention", "BatchAttentionWithAttentionSinkWrapper"]
