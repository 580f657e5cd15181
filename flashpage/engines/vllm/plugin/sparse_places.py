"""The places that flashpage takes among vLLM's backends over lists of tokens (DeepSeek V3.2), with FLASHPAGE_VLLM=on.

vLLM has no next backend for such models, so where flashpage does not serve the model's configuration these places keep
vLLM's own classes, and a warning says why.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from ....base.warn import warn

CLASSES = {
    "FLASH_ATTN_MLA_SPARSE": "InPlaceOfFlashAttnMLASparse",
    "FLASH_ATTN_MLA_SPARSE_FA4": "InPlaceOfFlashAttnMLASparseFA4",
    "FLASHMLA_SPARSE": "InPlaceOfFlashMLASparse",
    "FLASHINFER_MLA_SPARSE": "InPlaceOfFlashInferMLASparse",
    "FLASHINFER_MLA_SPARSE_SM90": "InPlaceOfFlashInferMLASparseSM90",
    "FLASHINFER_MLA_SPARSE_SM120": "InPlaceOfFlashInferMLASparseSM120",
}


def __getattr__(name: str) -> Any:
    """The class for a place, by which the plugin registers: vLLM looks it up whenever it chooses a layer's backend."""
    if name not in CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import sparse

    own = getattr(sparse, CLASSES[name])
    reasons = _reasons(own)
    if not reasons:
        return own
    _say("; ".join(reasons))
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return resolve_obj_by_qualname(AttentionBackendEnum[name].value)


def _reasons(own: Any) -> list[str]:
    """Why flashpage does not serve the configuration that vLLM chooses backends for."""
    from vllm.config import get_current_vllm_config_or_none

    from . import latent_write, sparse, support

    config = get_current_vllm_config_or_none()
    if config is None or config.model_config is None or not hasattr(config.model_config.hf_text_config, "index_topk"):
        return []  # not a model whose indexer lists tokens, so vLLM asks without need
    reasons = support.unserved_lists()
    kind = getattr(getattr(config, "cache_config", None), "cache_dtype", "auto")
    if kind not in sparse.FlashpageSparseBackend.supported_kv_cache_dtypes:
        reasons.append(f"flashpage reads no KV cache of {kind}")
    elif getattr(config.model_config.hf_text_config, "qk_rope_head_dim", 64) == 0 and (
        kind in latent_write.ROW_FORMATS or "auto" in own.packed_kv_cache_dtypes
    ):
        reasons.append("flashpage: rows of 656 bytes have 64 rotated columns")
    return reasons


@lru_cache
def _say(reasons: str) -> None:
    warn(f"vLLM's own attention reads the lists of tokens of this model: {reasons}")
