"""Options that cannot be served: SGLang is told when it is configured, by the errors that it raises itself."""

from __future__ import annotations

from typing import Any

import torch

from ..plugin.refusal import refusal
from .name import NAME

_KV_CACHE_TYPES = ("auto", "bf16", "bfloat16", "fp8_e4m3", "fp8_e5m2")
_NAMES_OF_BACKENDS = "attention_backend", "prefill_attention_backend", "decode_attention_backend"


def check_arguments(arguments: Any) -> None:
    """Checks SGLang's ServerArgs, before a model is loaded."""
    serves_model = NAME in (getattr(arguments, name, None) for name in _NAMES_OF_BACKENDS)
    if not serves_model and arguments.speculative_draft_attention_backend != NAME:
        return
    if arguments.kv_cache_dtype not in _KV_CACHE_TYPES:
        raise ValueError(
            f"--kv-cache-dtype {arguments.kv_cache_dtype}: flashpage reads {', '.join(_KV_CACHE_TYPES)}. "
            "Choose one of them, or another attention backend."
        )
    topk, page_size = arguments.speculative_eagle_topk or 0, arguments.page_size or 1
    if topk > 1 and page_size > 1:
        raise ValueError(
            f"--speculative-eagle-topk {topk} with --page-size {page_size}: flashpage drafts trees over pages of one "
            "token. Choose --page-size 1 or --speculative-eagle-topk 1."
        )
    if serves_model:
        check_model(arguments.get_model_config(), page_size)


def check_model(config: Any, page_size: int) -> None:
    """Checks SGLang's ModelConfig, which is known before weights are loaded."""
    if config.attention_arch.name == "MLA":
        raise ValueError(
            "this model has multi-head latent attention, which flashpage does not serve in SGLang. "
            "Choose another --attention-backend."
        )
    if getattr(config, "attention_chunk_size", None):
        raise ValueError(
            "this model has layers with attention in chunks, which flashpage does not serve in SGLang. "
            "Choose another --attention-backend."
        )
    if config.is_encoder_decoder and page_size > 1:
        raise ValueError(
            f"--page-size {page_size}: flashpage serves models with cross attention over pages of one token. "
            "Choose --page-size 1."
        )


def check_runner(runner: Any) -> None:
    """Checks the loaded model of a runner, which may be a draft."""
    config = runner.model_config
    check_model(config, runner.page_size)
    device = torch.device(runner.device)
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if capability is not None and capability < (8, 0):
        raise ValueError(
            f"this card has compute capability {capability[0]}.{capability[1]}; flashpage needs 8.0. "
            "Choose another --attention-backend."
        )
    reason = refusal(config.head_dim, runner.dtype, runner.kv_cache_dtype, runner.page_size, capability)
    if reason is not None:
        raise ValueError(f"{reason} Choose another --attention-backend.")


def check_layer(layer: Any) -> None:
    """Checks one of SGLang's RadixAttention layers."""
    found = {
        "v_head_dim": (layer.v_head_dim, layer.qk_head_dim),
        "pos_encoding_mode": (layer.pos_encoding_mode, "NONE"),
        "logit_capping_method": (layer.logit_capping_method, "tanh"),
        "xai_temperature_len": (layer.xai_temperature_len, -1),
    }
    for name, (given, accepted) in found.items():
        if given != accepted:
            raise ValueError(
                f"layer {layer.layer_id} has {name}={given!r}; flashpage serves {accepted!r} in SGLang. "
                "Choose another --attention-backend."
            )
