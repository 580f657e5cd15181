"""flashpage: the attention layer of an LLM server. `wrapper.plan(...)` once a step, `wrapper.run(q, kv)` once a layer.

Importing does nothing, and names are found at first use; only the variables of flashpage/watch change that.
"""

from __future__ import annotations

import importlib
import os as _os
from typing import TYPE_CHECKING, Any

from .base.version import VERSION as __version__

if TYPE_CHECKING:  # a star re-exports what a front door's __all__ names
    from .attention import *
    from .cascade import *
    from .decode import *
    from .errors import *
    from .mla import *
    from .page import *
    from .plan import *
    from .pod import *
    from .prefill import *
    from .quantization import *
    from .sparse import *
    from .utils import *
    from .variants import *

_EXPORTS = {
    "attention": "BatchAttention BatchAttentionWithAttentionSinkWrapper",
    "base.refused": "BatchDecodeMlaWithPagedKVCacheWrapper nvfp4_kv_dequantize xqa"
    " xqa_mla cudnn_batch_decode_with_kv_cache cudnn_batch_prefill_with_kv_cache nvfp4_kv_quantize nvfp4_quantize"
    " trtllm_fmha_v2_prefill",
    "cascade": "BatchDecodeWithSharedPrefixPagedKVCacheWrapper BatchPrefillWithSharedPrefixPagedKVCacheWrapper"
    " MultiLevelCascadeAttentionWrapper merge_state merge_state_in_place merge_states",
    "decode": "BatchDecodeWithPagedKVCacheWrapper CUDAGraphBatchDecodeWithPagedKVCacheWrapper fast_decode_plan"
    " single_decode_with_kv_cache single_decode_with_kv_cache_with_jit_module",
    "errors": "CapabilityError CompileError DeviceError FlashpageError KernelMissingError PlanError RunError"
    " SettingError VariantError",
    "mla": "BatchMLAPagedAttentionWrapper BatchMLASparseAttentionWrapper MLAPlanMetadata",
    "page": "append_paged_kv_cache append_paged_mla_kv_cache get_batch_indices_positions get_seq_lens"
    " nvfp4_quantize_append_paged_kv_cache nvfp4_quantize_append_paged_kv_cache_with_slot_mapping",
    "plan": "Plan",
    "pod": "BatchPODWithPagedKVCacheWrapper PODWithPagedKVCacheWrapper",
    "prefill": "BatchPrefillWithPagedKVCacheWrapper BatchPrefillWithRaggedKVCacheWrapper single_prefill_with_kv_cache"
    " single_prefill_with_kv_cache_return_lse single_prefill_with_kv_cache_with_jit_module",
    "quantization": "packbits segment_packbits",
    "sparse": "BlockSparseAttentionWrapper VariableBlockSparseAttentionWrapper",
    "utils": "next_positive_power_of_2",
    "variants": "Variant",
}
_MODULE_OF = {name: module for module, names in _EXPORTS.items() for name in names.split()}
_SUBMODULES = (
    "attention cascade compat decode engine errors flash_attn flash_mla integrations jit log mla ops page parallel pod "
    "prefill quantization sparse timeline utils variants vllm_ops"
)
_NOT_LISTED = ("hf", "torch_attention")  # need transformers or torch 2.11: programs that look at all names need neither

__all__ = ["__version__", *sorted(_MODULE_OF)]


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        value = getattr(importlib.import_module(f".{_MODULE_OF[name]}", __name__), name)
    elif name in (*_SUBMODULES.split(), *_NOT_LISTED):
        value = importlib.import_module(f".{name}", __name__)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES.split()})


if any(_os.environ.get(name) for name in ("FLASHPAGE_LOG", "FLASHPAGE_DUMP", "FLASHPAGE_NVTX")):
    try:
        importlib.import_module(".watch.calls", __name__).install()
    except ValueError:  # SettingError
        from .base.program import is_command

        if not is_command():  # which reports it in one line
            raise
