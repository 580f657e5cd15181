"""Features that single engines of engine_ranks.py use: cascades that vLLM's heuristics would not take, images, plain
attention of a DeepSeek, and a checkpoint in e4m3. Counts say that they ran."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import image_models
import torch
from vllm_program import leave_out_pixtral

LEAST_PREFIX = 256  # tokens, as in vLLM's heuristics


def prepare(setup: dict[str, Any]) -> Counter[str]:
    """Called before an engine is made in this process; returns counts of what it does."""
    found = Counter[str]()
    if setup["model"] == "paligemma":
        leave_out_pixtral()
        os.environ.setdefault("VLLM_MM_HASHER_ALGORITHM", "sha256")  # vLLM's usual one is a package of its own
    if setup["model"] == "generated":
        os.environ["VLLM_MLA_DISABLE"] = "1"  # a DeepSeek with plain attention
    if setup.get("cascade"):
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # which has no cascades
        _force_cascades(found)
    if setup.get("graphs") == "rotated":
        _count_rotations(found)
    return found


def _force_cascades(found: Counter[str]) -> None:
    from vllm.v1.attention.backends import flash_attn

    from flashpage.engines.vllm.plugin import cascade

    def is_worth(prefix_len: int, *given: Any, **named: Any) -> bool:
        found["cascades"] += int(prefix_len >= LEAST_PREFIX)
        return prefix_len >= LEAST_PREFIX

    flash_attn.use_cascade_attention = lambda common_prefix_len, *given, **named: is_worth(common_prefix_len)
    cascade.is_worth = is_worth


def _count_rotations(found: Counter[str]) -> None:
    """Of layers, in runs that are not replays of a graph."""
    from flashpage.engines.vllm.plugin.impl import FlashpageImpl

    rotate = FlashpageImpl.do_rope_and_kv_cache_update

    def counted(*given: Any, **named: Any) -> Any:
        found["rotations"] += 1
        return rotate(*given, **named)

    FlashpageImpl.do_rope_and_kv_cache_update = counted  # type: ignore[method-assign]


def counts_of_layers(llm: Any) -> dict[str, int]:
    """Layers of flashpage's that write e4m3."""
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    options = [getattr(getattr(layer, "impl", None), "options", None) for layer in layers]
    count = sum(each is not None and each.kind.out_dtype is not None for each in options)
    return {"layers with outputs of e4m3": count} if count else {}


def with_images(prompts: list[list[int]]) -> list[dict[str, Any]]:
    """vLLM's prompts, most of which have an image."""
    from PIL import Image

    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    for one, pixels in zip(given, image_models.images(len(prompts)), strict=True):
        if pixels is not None:
            one["multi_modal_data"] = {"image": Image.fromarray(pixels)}
    return given


def write_e4m3(folder: Path, source: Path) -> None:
    """A Llama's checkpoint with matrices in e4m3: a scale for each, and a fixed one for the rows that it multiplies."""
    from safetensors.torch import load_file, save_file

    weights: dict[str, torch.Tensor] = {}
    for name, weight in load_file(source / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            weights[name] = weight
            continue
        scale, stem = weight.abs().max() / 448, name.removesuffix("weight")
        weights[name] = (weight / scale).to(torch.float8_e4m3fn)
        weights |= {f"{stem}weight_scale": scale.float(), f"{stem}input_scale": torch.tensor(0.05)}
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "static"}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
