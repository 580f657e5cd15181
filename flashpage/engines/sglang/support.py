"""Options that cannot be served: SGLang is told when it is configured, by the errors that it raises itself."""

from __future__ import annotations

from typing import Any

import torch

from ..plugin.refusal import latent_refusal, refusal
from .name import CHUNKED, NAME, NAMING_FIELDS

_KV_CACHE_TYPES = ("auto", "bf16", "bfloat16", "fp8_e4m3", "fp8_e5m2")
_FROZEN_DRAFTS = "Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM"
_NO_FROZEN_DRAFTS = (
    "flashpage does not serve drafts that read the model's own cache (FROZEN_KV_MTP, of Gemma 4) in SGLang. "
    "Choose --speculative-draft-attention-backend triton."
)


def check_arguments(arguments: Any) -> None:
    """Checks SGLang's ServerArgs, before a model is loaded."""
    serves_model = NAME in (getattr(arguments, name, None) for name in NAMING_FIELDS)
    if not serves_model and arguments.speculative_draft_attention_backend != NAME:
        return
    if arguments.kv_cache_dtype not in _KV_CACHE_TYPES:
        raise ValueError(
            f"--kv-cache-dtype {arguments.kv_cache_dtype}: flashpage reads {', '.join(_KV_CACHE_TYPES)}. "
            "Choose one of them, or another attention backend."
        )
    _check_setting(arguments, resolved(arguments), serves_model)
    drafts_with = arguments.speculative_draft_attention_backend
    if arguments.speculative_algorithm == "FROZEN_KV_MTP" and drafts_with in (None, NAME):
        raise ValueError(f"--speculative-algorithm FROZEN_KV_MTP: {_NO_FROZEN_DRAFTS}")
    if serves_model:
        check_model(model_config_of(arguments), arguments.speculative_eagle_topk or 0)


def resolved(arguments: Any) -> Any:
    """SGLang's view of its ServerArgs with all that it has decided since."""
    try:
        from sglang.srt.arg_groups.overrides import resolved_view
    except ImportError:
        return arguments
    return resolved_view(arguments)


def _check_setting(arguments: Any, view: Any, serves_model: bool) -> None:
    """Checks how steps are divided, captured and planned. `view`: resolved(arguments)."""
    for option, name, of in (
        ("--dcp-size", "dcp_size", "decode"),
        ("--attn-cp-size", "attn_cp_size", "prefill"),
    ):
        size = max(getattr(given, name, None) or 1 for given in (arguments, view))
        if size > 1:
            raise ValueError(
                f"{option} {size}: flashpage has no {of} context parallelism in SGLang. "
                f"Choose another --attention-backend, or {option} 1."
            )
    prompts = getattr(view, "prefill_attention_backend", None) or getattr(view, "attention_backend", None)
    if NAME in (prompts, arguments.speculative_draft_attention_backend) and _captures_prompts(arguments, view):
        raise ValueError(
            "--cuda-graph-backend-prefill full: flashpage's plans of prompts are made on the host, and SGLang makes "
            "none before it replays such a graph. Choose --cuda-graph-backend-prefill breakable or disabled."
        )
    if serves_model and arguments.speculative_algorithm is not None and _plans_early():
        raise ValueError(
            "SGLANG_ENABLE_OVERLAP_PLAN_STREAM=1: steps that verify guesses would be planned before the guesses are "
            "known, and flashpage does not plan them again. Unset it, or choose another --attention-backend."
        )


def _captures_prompts(arguments: Any, view: Any) -> bool:
    """Whether whole steps of prompts are captured in one graph."""
    phase = getattr(getattr(view, "cuda_graph_config", None), "prefill", None)
    chosen = getattr(arguments, "cuda_graph_backend_prefill", None) if phase is None else phase.backend
    return bool(chosen == "full")


def _plans_early() -> bool:
    """Whether SGLang plans steps on a stream of their own while the step before runs."""
    from sglang.srt.environ import envs

    setting = getattr(envs, "SGLANG_ENABLE_OVERLAP_PLAN_STREAM", None)
    return setting is not None and bool(setting.get())


def model_config_of(arguments: Any) -> Any:
    """SGLang's ModelConfig; newer versions have a function in place of the method."""
    find = getattr(arguments, "get_model_config", None)
    if find is None:
        from sglang.srt.arg_groups.model_override_base import model_config_of

        return model_config_of(arguments)
    return find()


def architecture_of(config: Any) -> str:
    """The name of a ModelConfig's model."""
    return str(config.hf_config.architectures[0])


def has_latent_rows(config: Any) -> bool:
    """Whether a ModelConfig's layers have multi-head latent attention (MLA)."""
    return bool(config.attention_arch.name == "MLA")


def check_model(config: Any, topk: int) -> None:
    """Checks SGLang's ModelConfig, which is known before weights are loaded."""
    if architecture_of(config) in _FROZEN_DRAFTS:
        raise ValueError(_NO_FROZEN_DRAFTS)
    if _has_two_sided_prompts(config.hf_config):
        raise ValueError(
            "rows of this model's prompts see both sides (HRM-Text): SGLang serves it with its Triton attention alone. "
            "Choose --attention-backend triton."
        )
    if has_latent_rows(config):
        _check_latent_model(config, topk)
    if getattr(config, "attention_chunk_size", None):
        _check_chunked_model(config, topk)


def _has_two_sided_prompts(config: Any) -> bool:
    """Whether it is an HRM-Text with prompts of this kind, as SGLang finds out once it has loaded the model."""
    is_hrm = getattr(config, "model_type", None) == "hrm_text" or "HrmTextForCausalLM" in config.architectures
    return is_hrm and bool(getattr(config, "prefix_lm", True))


def _check_chunked_model(config: Any, topk: int) -> None:
    if architecture_of(config) not in CHUNKED and not getattr(config, "is_draft_model", False):
        raise ValueError(
            "this model has layers with attention in chunks, which flashpage serves in SGLang for Llama 4 alone. "
            "Choose another --attention-backend."
        )
    if topk > 1:
        raise ValueError(
            f"--speculative-eagle-topk {topk}: flashpage verifies no trees for models with attention in chunks. "
            "Choose --speculative-eagle-topk 1."
        )


def _check_latent_model(config: Any, topk: int) -> None:
    if any(getattr(given, "llama_4_scaling", None) is not None for given in (config.hf_config, config.hf_text_config)):
        raise ValueError(
            "this model's queries are scaled by their positions (llama_4_scaling, of Mistral Large 3), which SGLang "
            "does not do for flashpage's latent rows. Choose another --attention-backend, such as triton."
        )
    if getattr(config.hf_text_config, "index_topk", None) is not None:
        raise ValueError(
            "this model's layers choose the tokens that they see (DeepSeek sparse attention). flashpage serves them "
            "inside SGLang's backend alone: set FLASHPAGE_SGLANG=on and choose --attention-backend dsa."
        )
    if topk > 1:
        raise ValueError(
            f"--speculative-eagle-topk {topk}: flashpage drafts no trees for models with multi-head latent attention. "
            "Choose --speculative-eagle-topk 1."
        )


def check_runner(runner: Any) -> None:
    """Checks the loaded model of a runner, which may be a draft."""
    config = runner.model_config
    check_model(config, runner.server_args.speculative_eagle_topk or 0)
    device = torch.device(runner.device)
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if capability is not None and capability < (8, 0):
        raise ValueError(
            f"this card has compute capability {capability[0]}.{capability[1]}; flashpage needs 8.0. "
            "Choose another --attention-backend."
        )
    given = runner.dtype, runner.kv_cache_dtype, runner.page_size, capability
    if has_latent_rows(config):
        reason = latent_refusal(config.kv_lora_rank + config.qk_rope_head_dim, *given, config.kv_lora_rank)
    else:
        reason = refusal(config.head_dim, *given)
    if reason is not None:
        raise ValueError(f"{reason} Choose another --attention-backend.")


def check_keywords(layer: Any, given: dict[str, Any]) -> None:
    """Refuses what a RadixAttention layer's model hands to attention in addition to q, k, v and sinks."""
    unknown = [name for name, value in given.items() if value is not None and value is not False]
    if unknown:
        raise ValueError(
            f"layer {layer.layer_id} passes {', '.join(unknown)}, which flashpage does not serve in SGLang. "
            "Choose another --attention-backend."
        )


def check_layer(layer: Any, v_head_dim: int) -> None:
    """Checks one of SGLang's RadixAttention layers, whose V has `v_head_dim` columns."""
    found = {
        "v_head_dim": (layer.v_head_dim, v_head_dim),
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
