"""The engines that engine_ranks.py compares, and vLLM's arguments for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rank_models import KV_HEADS, SIZES, SMALL

NEW_TOKENS = {"mixed": 16, "again": 16, "short": 64}  # "again": prefixes come from the cache

# Each engine: its model, and how it differs from flashpage on one card. Others are compared with `MODEL-1`.
Setup = dict[str, Any]
TWO: Setup = {"ranks": 2}
VLLM: dict[str, Setup] = {
    "llama-1": {"model": "llama"},
    "llama-2": {"model": "llama", **TWO},
    # Fewer tokens than the requests have, so that some are preempted.
    "llama-2-preempted": {"model": "llama", **TWO, "cache": 1280, "kinds": ("short",)},
    "llama-1-other": {"model": "llama", "backend": "FLASH_ATTN"},
    "llama-2-other": {"model": "llama", **TWO, "backend": "FLASH_ATTN"},
    "bloom-1": {"model": "bloom"},
    "bloom-2": {"model": "bloom", **TWO},
    "bloom-1-other": {"model": "bloom", "backend": "FLASH_ATTN"},
    "sinks-1": {"model": "llama", "sinks": True},
    "sinks-2": {"model": "llama", **TWO, "sinks": True},
    "sinks-1-other": {"model": "llama", "sinks": True, "backend": "FLASH_ATTN"},
    "mqa-1": {"model": "mqa"},
    "mqa-2-context": {"model": "mqa", **TWO, "context": 2},
}
SGLANG: dict[str, Setup] = {
    "llama-1": {"model": "llama"},
    "llama-2": {"model": "llama", **TWO},
    "llama-2-eager": {"model": "llama", **TWO, "is_eager": True},
    "llama-2-pages": {"model": "llama", **TWO, "page_size": 64},
    "llama-1-other": {"model": "llama", "backend": "fa3"},
    "llama-2-other": {"model": "llama", **TWO, "backend": "fa3"},
    "mqa-1": {"model": "mqa"},
    "mqa-2": {"model": "mqa", **TWO},
}
# On one card: other ways to run the same model.
VLLM_OPTIONS: dict[str, Setup] = {
    "llama-1": {"model": "llama"},
    "llama-1-other": {"model": "llama", "backend": "FLASH_ATTN"},
    "llama-1-eager": {"model": "llama", "graphs": "none"},
    "llama-1-compiled": {"model": "llama", "graphs": "compiled"},  # torch.compile, FULL_AND_PIECEWISE
    "llama-1-preempted": {"model": "llama", "cache": 1280, "kinds": ("short",)},
    "llama-1-guesses": {"model": "llama", "guesses": 3},  # by n-grams of the prompt
    "llama-1-many": {"model": "llama", "kinds": ("many",)},
    "fp8-1": {"model": "llama", "kv_dtype": "fp8"},
    "fp8-1-other": {"model": "llama", "kv_dtype": "fp8", "backend": "FLASH_ATTN"},
    "windows-1": {"model": "llama", "window": 100},
    "windows-1-other": {"model": "llama", "window": 100, "backend": "FLASH_ATTN"},
}

_GRAPHS: dict[str, Setup] = {
    "decodes": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16]},
    "compiled": {"cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": [1, 2, 4, 8, 16]},
    "none": {"mode": 0},
}


def vllm_options(setup: Setup, folder: Path, is_small: bool) -> Setup:
    sizes, ranks, cache = SMALL if is_small else SIZES, setup.get("ranks", 1), 64 << 20 if is_small else 1 << 30
    if "cache" in setup:
        heads = KV_HEADS[setup["model"]] // ranks
        cache = setup["cache"] * 2 * heads * sizes["head_dim"] * (4 if is_small else 2) * sizes["num_hidden_layers"]
    graphs = "none" if is_small else setup.get("graphs", "decodes")
    found = {
        "model": str(folder / setup["model"]),
        "skip_tokenizer_init": True,
        "dtype": "float32" if is_small else "bfloat16",
        "tensor_parallel_size": ranks,
        "decode_context_parallel_size": setup.get("context", 1),
        "max_model_len": 1024,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 512,  # longer prompts come in chunks, next to decodes of others
        "block_size": 32 if is_small else 16,
        "enable_prefix_caching": True,
        "kv_cache_memory_bytes": cache,
        "gpu_memory_utilization": 0.02,  # which must be free; the cache has its size above
        "disable_custom_all_reduce": True,
        "disable_log_stats": False,
        "enforce_eager": graphs == "none",
        "compilation_config": _GRAPHS[graphs] | ({"custom_ops": ["none"]} if is_small else {}),
        "kv_cache_dtype": setup.get("kv_dtype", "auto"),
    }
    if "guesses" in setup:
        found["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": setup["guesses"],
            "prompt_lookup_max": 4,
        }
    if "window" in setup:
        found["hf_overrides"] = {"sliding_window": setup["window"]}
    return found if is_small else found | {"attention_config": {"backend": setup.get("backend", "CUSTOM")}}
