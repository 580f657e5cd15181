"""The class that CUSTOM names, vLLM's one name for a plugin's backend. vLLM looks it up whenever it chooses a layer's
backend, and the model's configuration says whether its layers have latent rows (MLA)."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """`Chosen`, by which the plugin registers."""
    if name != "Chosen":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    if config is not None and config.model_config is not None and config.model_config.use_mla:
        if hasattr(config.model_config.hf_text_config, "index_topk"):  # its indexer lists tokens
            from .sparse import FlashpageSparseBackend

            return FlashpageSparseBackend
        from .latent import FlashpageMLABackend

        return FlashpageMLABackend
    from .backend import FlashpageBackend

    return FlashpageBackend
