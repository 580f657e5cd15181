"""vLLM's block-layout operators: importing this registers `torch.ops.flashpage.paged_attention_v1` and the others."""

from .engines.vllm.operators import (
    paged_attention_v1,
    paged_attention_v2,
    reshape_and_cache,
    reshape_and_cache_flash,
    split_kv_cache,
)

__all__ = ["paged_attention_v1", "paged_attention_v2", "reshape_and_cache", "reshape_and_cache_flash", "split_kv_cache"]
