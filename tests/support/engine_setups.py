"""The engines that engine_ranks.py compares, and vLLM's arguments for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rank_models import sizes_of
from tiny_model import GEMMA4_NAMES

NEW_TOKENS = {"mixed": 16, "again": 16, "short": 64, "shared": 24, "images": 16}
KINDS = "mixed", "again", "short"  # of most engines; "again": prefixes come from the cache

# Each engine: its model, and how it differs from flashpage on one card. Others are compared with `MODEL-1`, and all
# engines of a model with `MODEL-1-exact`.
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
# On one card: trees of guesses over pages of 64 tokens in captured steps, by a draft of random weights, by the model
# itself, whose guesses are mostly accepted, and by n-grams; sinks and windows, and heads of two sizes. `EXACT` says
# whose rounding a difference is: SGLang's attention in torch reads windows from slots of all layers, and is no judge.
_TREES: Setup = {"model": "llama", "page_size": 64}
EXACT: Setup = {"backend": "transformers", "kinds": ("mixed", "short")}  # plain attention in fp32
SGLANG_OPTIONS: dict[str, Setup] = {
    "llama-1": {"model": "llama", "page_size": 64},
    "llama-1-other": {"model": "llama", "page_size": 64, "backend": "triton"},
    "llama-1-eagle": {**_TREES, "guesses": "EAGLE", "draft": "eagle"},
    "llama-1-itself": {**_TREES, "guesses": "STANDALONE", "draft": "llama"},
    "llama-1-itself-other": {**_TREES, "guesses": "STANDALONE", "draft": "llama", "backend": "triton"},
    "llama-1-ngrams": {**_TREES, "guesses": "NGRAM"},
    "gptoss-1": {"model": "gptoss"},
    "gptoss-1-other": {"model": "gptoss", "backend": "triton"},
    "gptoss-1-exact": {"model": "gptoss", **EXACT},
    "gemma4-1": {"model": "gemma4"},
    "gemma4-1-other": {"model": "gemma4", "backend": "triton"},
    "gemma4-1-exact": {"model": "gemma4", **EXACT},
}
# On one card: other ways to run the same model.
_CASCADE: Setup = {"model": "llama", "kinds": ("shared",), "graphs": "compiled", "cascade": True}
_IMAGES: Setup = {"model": "paligemma", "kinds": ("images",)}
_GENERATED: Setup = {"model": "generated", "kinds": ("short",)}
VLLM_OPTIONS: dict[str, Setup] = {
    "llama-1": {"model": "llama"},
    "llama-1-other": {"model": "llama", "backend": "FLASH_ATTN"},
    "llama-1-eager": {"model": "llama", "graphs": "none"},
    "llama-1-compiled": {"model": "llama", "graphs": "compiled"},  # torch.compile, FULL_AND_PIECEWISE
    "llama-1-full": {"model": "llama", "graphs": "full"},  # steps with prompts are captured, too
    "llama-1-preempted": {"model": "llama", "cache": 1280, "kinds": ("short",)},
    "llama-1-guesses": {"model": "llama", "guesses": 3},  # by n-grams of the prompt
    "llama-1-many": {"model": "llama", "kinds": ("many",)},
    "llama-1-many-eager": {"model": "llama", "kinds": ("many",), "graphs": "none"},
    "fp8-1": {"model": "llama", "kv_dtype": "fp8"},
    "fp8-1-other": {"model": "llama", "kv_dtype": "fp8", "backend": "FLASH_ATTN"},
    "fp8-1-flashinfer": {"model": "llama", "kv_dtype": "fp8", "backend": "FLASHINFER"},
    "llama-1-draft": {"model": "llama", "draft": "draft"},  # half of its layers
    "llama-1-draft-other": {"model": "llama", "draft": "draft", "backend": "FLASH_ATTN"},
    "llama-1-eagle": {"model": "llama", "draft": "eagle-of-vllm"},  # of random weights
    "llama-1-eagle-other": {"model": "llama", "draft": "eagle-of-vllm", "backend": "FLASH_ATTN"},
    "llama-1-rotated": {"model": "llama", "graphs": "rotated"},  # rotation and cache write in one kernel
    "llama-1-blocks-64": {"model": "llama", "block_size": 64},
    "llama-1-blocks-128": {"model": "llama", "block_size": 128},
    "cascade-1": {"model": "llama", "kinds": ("shared",), "graphs": "compiled"},
    "cascade-1-forced": {**_CASCADE},
    "cascade-1-forced-other": {**_CASCADE, "backend": "FLASH_ATTN"},
    "e4m3-1": {"model": "e4m3", "graphs": "compiled"},
    "e4m3-1-fused": {"model": "e4m3", "graphs": "quantized"},  # attention writes e4m3
    "e4m3-1-other": {"model": "e4m3", "graphs": "compiled", "backend": "FLASH_ATTN"},
    "images-1": {**_IMAGES},  # whose tokens see each other; FLASH_ATTN wants FA4 for that
    "images-1-other": {**_IMAGES, "backend": "TRITON_ATTN"},
    "images-1-exact": {**_IMAGES, "backend": "transformers"},
    "generated-1": {**_GENERATED},  # windows of generated tokens (R-SWA)
    "generated-1-eager": {**_GENERATED, "graphs": "none"},
    "generated-1-other": {**_GENERATED, "graphs": "none", "backend": "TRITON_ATTN"},  # 0.26 captures it without windows
    "generated-1-exact": {**_GENERATED, "backend": "transformers"},
    "windows-1": {"model": "llama", "window": 100},
    "windows-1-other": {"model": "llama", "window": 100, "backend": "FLASH_ATTN"},
    "windows-1-blocks-64": {"model": "llama", "window": 100, "block_size": 64},
}

_GRAPHS: dict[str, Setup] = {
    "decodes": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16]},
    "compiled": {"cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": [1, 2, 4, 8, 16]},
    "full": {"cudagraph_mode": "FULL", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 64, 256, 512]},
    "none": {"mode": 0},
    "rotated": {
        "custom_ops": ["+rotary_embedding"],
        "splitting_ops": [],
        "cudagraph_mode": "FULL",
        "cudagraph_capture_sizes": [1, 2, 4, 8, 16],
    },
    "quantized": {
        "pass_config": {"fuse_attn_quant": True},
        "cudagraph_mode": "FULL",
        "cudagraph_capture_sizes": [1, 2, 4, 8, 16],
    },
}


def vllm_options(setup: Setup, folder: Path, is_small: bool, is_wide: bool = False) -> Setup:
    ranks, cache = setup.get("ranks", 1), 64 << 20 if is_small else 1 << 30
    if "cache" in setup:
        sizes = sizes_of(setup["model"], is_small, is_wide)
        heads = sizes["num_key_value_heads"] // ranks
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
        "block_size": setup.get("block_size", 32 if is_small else 16),
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
    if "draft" in setup:
        found["speculative_config"] = {
            "method": "eagle" if "eagle" in setup["draft"] else "draft_model",
            "model": str(folder / setup["draft"]),
            "num_speculative_tokens": 3,
        }
    if setup.get("cascade"):
        found["disable_cascade_attn"] = False
    if setup["model"] == "paligemma":
        found |= {"skip_tokenizer_init": False, "disable_chunked_mm_input": True, "max_model_len": 512}
    if "window" in setup:
        found["hf_overrides"] = {"sliding_window": setup["window"]}
    return found if is_small else found | {"attention_config": {"backend": setup.get("backend", "CUSTOM")}}


def sglang_options(setup: Setup, folder: Path, is_small: bool, device: str) -> Setup:
    backend = setup.get("backend", "flashpage")
    found = {
        "model_path": str(folder / setup["model"]),
        "skip_tokenizer_init": True,
        "dtype": "float32" if is_small else "bfloat16",
        "attention_backend": "torch_native" if is_small and backend != "flashpage" else backend,
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "device": device,
        "tp_size": setup.get("ranks", 1),
        "page_size": setup.get("page_size", 1),
        "context_length": 1024,
        "chunked_prefill_size": 512,
        "enable_mixed_chunk": True,
        "max_running_requests": 16,
        "max_total_tokens": 16384,
        "cuda_graph_backend_decode": "disabled" if is_small or setup.get("is_eager") else "full",
        "cuda_graph_backend_prefill": "disabled",
        "disable_custom_all_reduce": True,
        "log_level": "error",
    }
    if not is_small:
        found |= {"cuda_graph_max_bs_decode": 16, "mem_fraction_static": 0.5}
    if "guesses" in setup:
        found |= {"speculative_algorithm": setup["guesses"], "speculative_num_draft_tokens": 8}
    if "draft" in setup:
        found |= {
            "speculative_draft_model_path": str(folder / setup["draft"]),
            "speculative_num_steps": 3,
            "speculative_eagle_topk": 4,
        }
    if setup["model"] == "gemma4":
        own = {"moe_intermediate_size": 256} if device == "cpu" else {}  # there SGLang divides it, without experts too
        found["json_model_override_args"] = json.dumps(GEMMA4_NAMES | own)
    return found
