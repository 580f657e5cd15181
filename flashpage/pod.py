"""`flashinfer.pod`: a prefill and a batch of decodes in one launch."""

from .wrappers.pod import BatchPODWithPagedKVCacheWrapper, PODWithPagedKVCacheWrapper

__all__ = ["BatchPODWithPagedKVCacheWrapper", "PODWithPagedKVCacheWrapper"]
