"""Models and requests for engines of several ranks."""

from __future__ import annotations

import random
from pathlib import Path

import engine_features
import image_models
import tiny_model
import torch
from engine_turns import LLAMA

VOCABULARY = 1000
GENERATED_WINDOW = 16  # tokens after the prompt that a row of "generated" sees
SIZES = {
    "hidden_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "head_dim": 128,
    "intermediate_size": 4096,
}
SMALL = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "head_dim": 32,
    "intermediate_size": 256,
}
KV_HEADS = {"llama": 4, "mqa": 1}


def sizes_of(name: str, is_small: bool, is_wide: bool) -> dict[str, int]:
    """`is_wide`: the shape of Llama's 8B with 16 layers; the vocabulary stays small."""
    if is_wide:
        return {key: LLAMA[key] for key in (*SIZES, "num_key_value_heads")}
    return (SMALL if is_small else SIZES) | {"num_key_value_heads": KV_HEADS[name]}


def requests(kind: str) -> list[list[int]]:
    """`mixed`: prompts of up to 900 tokens, every second one with a common beginning. `short`: many that grow.
    `shared`: all with a common beginning that is long enough for cascades. `images`: most have an image."""
    drawn = random.Random(3)

    def prompt(length: int) -> list[int]:
        return [drawn.randrange(3, VOCABULARY) for _ in range(length)]

    if kind == "short":
        return [prompt(60 + i) for i in range(16)]
    if kind == "shared":
        common = prompt(400)
        return [common + prompt(5 + 9 * i) for i in range(12)]
    if kind == "images":
        return image_models.questions()
    shared = prompt(192)
    lengths = (3, 17, 64, 100, 128, 150, 200, 300, 330, 400, 500, 700)
    return [(shared if i % 2 else []) + prompt(length) for i, length in enumerate(lengths)]


def write_models(folder: Path, is_small: bool, is_wide: bool = False) -> None:
    """All models; of the wide shape a Llama alone, with its drafts."""
    from transformers import BloomConfig, BloomForCausalLM

    for name in ("llama",) if is_wide else KV_HEADS:
        tiny_model.MODELS[name] = sizes_of(name, is_small, is_wide)
        tiny_model.write(folder / name, name)
    half = sizes_of("llama", is_small, is_wide)["num_hidden_layers"] // 2
    tiny_model.write(folder / "draft", "llama", num_hidden_layers=half)  # the first layers, some of whose guesses hold
    tiny_model.write_eagle(folder / "eagle-of-vllm", "llama", "vllm")
    if is_wide:
        return
    engine_features.write_e4m3(folder / "e4m3", folder / "llama")
    image_models.write_paligemma(folder / "paligemma")
    tiny_model.write_reference_windows(folder / "generated", GENERATED_WINDOW)
    sizes, dtype = (SMALL, torch.float32) if is_small else (SIZES, torch.bfloat16)
    tiny_model.write_eagle(folder / "eagle", "llama")
    tiny_model.write_gpt_oss(folder / "gptoss", dtype)
    tiny_model.write_gemma4(folder / "gemma4", dtype)
    torch.manual_seed(0)
    heads, dim = sizes["num_attention_heads"], 32 if is_small else 64
    config = BloomConfig(
        vocab_size=VOCABULARY,
        hidden_size=heads * dim,
        n_layer=sizes["num_hidden_layers"],
        n_head=heads,
        initializer_range=1.3 / (heads * dim) ** 0.5,  # large enough for attention to decide the next token
        bos_token_id=1,
        eos_token_id=2,
    )
    BloomForCausalLM(config).save_pretrained(folder / "bloom")
