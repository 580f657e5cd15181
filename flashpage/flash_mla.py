"""FlashMLA's functions for inference: `from flashpage.flash_mla import flash_mla_with_kvcache, get_mla_metadata`."""

from .engines.flash_mla.functions import (
    FlashMLASchedMeta,
    flash_mla_sparse_fwd,
    flash_mla_with_kvcache,
    get_mla_metadata,
)

__all__ = ["FlashMLASchedMeta", "flash_mla_sparse_fwd", "flash_mla_with_kvcache", "get_mla_metadata"]
