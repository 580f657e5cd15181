"""A tiny PaliGemma 2 with images for it, whose tokens see each other in both directions, and transformers' answers.

Nothing here needs Pillow, which vLLM's packages have and the tests' own environment has not.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import tiny_model
import torch
from tiny_model import VOCABULARY, prompts

BEGIN, NEWLINE, IMAGE = 2, 3, VOCABULARY  # tokens; the last one is no answer
SIDE, PATCH = 40, 8  # pixels
TOKENS = (SIDE // PATCH) ** 2  # of an image
WIDTH = 128  # of the layers of text


def write_paligemma(folder: Path) -> Path:
    """Every second layer has a window of 32 tokens, and an image 25."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        Gemma2Config,
        PaliGemmaConfig,
        PaliGemmaForConditionalGeneration,
        PreTrainedTokenizerFast,
        SiglipVisionConfig,
    )

    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 256, "num_hidden_layers": 4, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "query_pre_attn_scalar": 4}
    text = Gemma2Config(
        vocab_size=VOCABULARY,
        sliding_window=32,
        attn_logit_softcapping=5.0,
        max_position_embeddings=512,
        bos_token_id=BEGIN,
        **sizes,
        **heads,
    )
    seen = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = SiglipVisionConfig(image_size=SIDE, patch_size=PATCH, vision_use_head=False, **seen)
    config = PaliGemmaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=IMAGE,
        projection_dim=WIDTH,
        hidden_size=WIDTH,
        vocab_size=VOCABULARY,
    )
    model = PaliGemmaForConditionalGeneration(config)
    for part in (model.model.vision_tower, model.model.multi_modal_projector):
        for weight in part.parameters():
            torch.nn.init.normal_(weight, std=0.15)  # so that images differ from one another
    model.save_pretrained(folder)
    _rename_weights(folder / "model.safetensors")
    names = {f"[{i}]": i for i in range(VOCABULARY)}
    for name, token in (("<bos>", BEGIN), ("\n", NEWLINE), ("<image>", IMAGE)):
        names.pop(f"[{token}]", None)
        names[name] = token
    words = Tokenizer(models.WordLevel(names, "[0]"))
    words.pre_tokenizer = pre_tokenizers.Split("\n", "isolated")
    words.add_special_tokens(["<image>", "<bos>"])  # vLLM 0.26 has many of them written in one text
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[0]", bos_token="<bos>").save_pretrained(folder)
    kinds = {"image_processor_type": "SiglipImageProcessor", "processor_class": "PaliGemmaProcessor"}
    sizes_of_images = {"size": {"height": SIDE, "width": SIDE}, "image_seq_length": TOKENS}
    (folder / "preprocessor_config.json").write_text(json.dumps(kinds | sizes_of_images))
    return folder


def _rename_weights(path: Path) -> None:
    """The encoder's weights get the names that they have in published checkpoints, which vLLM knows."""
    from safetensors.torch import load_file, save_file

    weights = {name.replace("vision_tower.", "vision_tower.vision_model."): w for name, w in load_file(path).items()}
    save_file(weights, path, metadata={"format": "pt"})


def questions() -> list[list[int]]:
    """Prompts, without their images. Some do not fit into one step with others."""
    return [prompt[:100] for prompt in prompts()[:6]]


def images(count: int) -> list[np.ndarray | None]:
    """Noise, [SIDE, SIDE, 3] bytes; every third prompt has no image."""
    drawn = [np.random.default_rng(i).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8) for i in range(count)]
    return [None if i % 3 == 2 else pixels for i, pixels in enumerate(drawn)]


def expected_tokens(folder: Path, count: int, is_causal: bool = False, scale: float = 1.0) -> list[list[int]]:
    """Greedy tokens of `answers`."""
    return [answer["tokens"] for answer in answers(folder, count, is_causal=is_causal, scale=scale)]


def scale_of(vllm_version: str) -> float:
    """vLLM 0.26 divides the rows of images by the root of the width, as earlier versions of transformers did."""
    return WIDTH**-0.5 if vllm_version.startswith("0.26.") else 1.0


def answers(
    folder: Path, count: int, device: str = "cpu", *, is_causal: bool = False, scale: float = 1.0
) -> list[dict[str, Any]]:
    """Greedy tokens, and the log-probabilities of the best five at each step, by eager attention in fp32. vLLM puts an
    image and the first token before a prompt, and a new line after it.

    Args:
        scale: rows of images are multiplied by it before the first layer of text.
    """
    from transformers import PaliGemmaForConditionalGeneration

    model = PaliGemmaForConditionalGeneration.from_pretrained(folder, attn_implementation="eager").eval().to(device)
    for weight in model.model.multi_modal_projector.parameters():
        weight.data *= scale
    given, found = questions(), []
    for prompt, image in zip(given, images(len(given)), strict=True):
        tokens, seen = list(prompt), {}
        if image is not None:
            tokens = [IMAGE] * TOKENS + [BEGIN, *prompt, NEWLINE]
            pixels = torch.from_numpy(image).permute(2, 0, 1)[None] / 127.5 - 1
            seen = {"pixel_values": pixels.to(device)}

        def logits_of(ids: torch.Tensor, seen: dict[str, torch.Tensor] = seen) -> torch.Tensor:
            kinds = torch.where(ids == IMAGE, int(is_causal), 1)  # tokens of kind 0 see each other
            return model(input_ids=ids, token_type_ids=kinds, use_cache=False, **seen).logits

        found.append(tiny_model.greedy(logits_of, tokens, count, device))
    return found
