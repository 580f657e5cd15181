"""`flashinfer.pod`: a prefill and a batch of decodes in one launch."""

from .wrappers.pod import PODWithPagedKVCacheWrapper
from .wrappers.pod_batch import BatchPODWithPagedKVCacheWrapper

__all__ = ["BatchPODWithPagedKVCacheWrapper", "PODWithPagedKVCacheWrapper"]
