"""Tiny transformers models with random weights, one for each feature that attention must support."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from transformers.generation import ContinuousBatchingConfig

from flashpage import hf

VOCABULARY = 128
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,  # so that greedy tokens differ from one another
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_ALTERNATING = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_GPT_OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8, **_ALTERNATING}
_DEEPSEEK = {
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "head_dim": None,
}

# name: (configuration class, options other than the sizes)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {}),  # normalised queries and keys
    "mistral": ("MistralConfig", {"sliding_window": 8}),  # a window in all layers
    "gemma2": ("Gemma2Config", {"sliding_window": 8, "attn_logit_softcapping": 5.0, **_ALTERNATING}),  # soft cap
    "gemma3": ("Gemma3TextConfig", {"sliding_window": 8, **_ALTERNATING}),  # two RoPEs, and a separate scale
    "gpt-oss": ("GptOssConfig", _GPT_OSS),  # sinks
    "deepseek-v3": ("DeepseekV3Config", _DEEPSEEK),  # keys of 192, values of 128, expanded from latents
}


def make_config(name: str, *, config_class: str | None = None, **changes: Any) -> Any:
    """The configuration of a model of the table with changes, or of another class."""
    table_class, own = MODELS[name]
    options = {key: value for key, value in (_SIZES | own | changes).items() if value is not None or key != "head_dim"}
    return getattr(transformers, config_class or table_class)(**options)


def make_model(name: str, seed: int = 0, implementation: str = "eager", **changes: Any) -> Any:
    """The model in fp32 on the CPU, in evaluation mode."""
    torch.manual_seed(seed)
    config = make_config(name, **changes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("sinks"):
            torch.nn.init.normal_(parameter, std=2.0)
    return model.eval()


def make_kimi(seed: int = 0, implementation: str = "eager") -> Any:
    """Kimi K2.5, whose text model is DeepSeek's, with the smallest tower for pictures."""
    torch.manual_seed(seed)
    sizes = {"patch_size": 2, "num_attention_heads": 2, "num_hidden_layers": 1, "hidden_size": 16}
    tower = transformers.Kimi_K25VisionConfig(**sizes, intermediate_size=16, pos_emb_height=4, pos_emb_width=4)
    tokens = {"image_token_id": 2, "video_token_id": 3, "vision_start_token_id": 4, "vision_end_token_id": 5}
    config = transformers.Kimi_K25Config(
        text_config=make_config("deepseek-v3"), vision_config=tower, projection_hidden_size=16, **tokens
    )
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation=implementation)
    return model.eval()


def left_padded(lengths: list[int], seed: int = 1) -> dict[str, torch.Tensor]:
    """input_ids and attention_mask of a batch of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    mask = torch.zeros(len(lengths), width, dtype=torch.int64)
    for row, length in enumerate(lengths):
        mask[row, width - length :] = 1
    ids = torch.randint(1, VOCABULARY, mask.shape, generator=generator) * mask
    return {"input_ids": ids, "attention_mask": mask}


def greedy(model: Any, inputs: dict[str, torch.Tensor], new_tokens: int, **options: Any) -> torch.Tensor:
    """The generated tokens after the inputs."""
    with torch.no_grad():
        ids = model.generate(**inputs, do_sample=False, max_new_tokens=new_tokens, **options)
    return ids[:, inputs["input_ids"].shape[1] :]


def prompts_of(inputs: dict[str, torch.Tensor]) -> list[list[int]]:
    """The rows of a padded batch without their padding."""
    rows = zip(inputs["input_ids"], inputs["attention_mask"].bool(), strict=True)
    return [ids[mask].tolist() for ids, mask in rows]


def batch_options(new_tokens: int, page_size: int, **options: Any) -> dict[str, Any]:
    """Keyword arguments of `generate_batch`: greedy, to the last token."""
    pages = {"page_size" if hasattr(ContinuousBatchingConfig(), "page_size") else "block_size": page_size}
    return {
        "generation_config": transformers.GenerationConfig(
            max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        "continuous_batching_config": ContinuousBatchingConfig(max_memory_percent=0.5, **pages, **options),
    }


def after_one_prompt(model: Any) -> tuple[hf.PagedCache, dict[str, torch.Tensor]]:
    """A cache of three requests that share a prompt, which was computed once, and the inputs that go on from it."""
    prompt = left_padded([18])["input_ids"]
    ends = torch.randint(1, VOCABULARY, (3, 4), generator=torch.Generator().manual_seed(5))
    prefix = hf.PagedCache(model.config, page_size=4)
    with torch.no_grad():
        model(input_ids=prompt, past_key_values=prefix)
    cache = copy.deepcopy(prefix)
    cache.batch_repeat_interleave(3)
    ids = torch.cat([prompt.repeat(3, 1), ends], dim=1)
    return cache, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
