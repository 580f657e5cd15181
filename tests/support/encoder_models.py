"""Tiny models with an encoder, and transformers' answers: a BERT, and a Whisper with sounds for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny_model import VOCABULARY, prompts

RATE = 16000  # samples per second
BEGIN = 3  # Whisper's first token


def write_bert(folder: Path) -> Path:
    """A BERT with a tokenizer, which vLLM wants for models that embed."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    BertModel(BertConfig(vocab_size=VOCABULARY, initializer_range=0.2, **sizes)).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"[{i}]": i for i in range(VOCABULARY)}, "[0]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[0]").save_pretrained(folder)
    return folder


def expected_embeddings(folder: Path) -> list[torch.Tensor]:
    """The first token's last hidden state, of length 1."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        states = [model(torch.tensor([prompt])).last_hidden_state[0, 0] for prompt in prompts()]
    return [torch.nn.functional.normalize(state, dim=0) for state in states]


def write_whisper(folder: Path) -> Path:
    """A Whisper that hears two seconds, 100 tokens of its encoder."""
    from transformers import (
        WhisperConfig,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
        WhisperProcessor,
        WhisperTokenizer,
    )

    torch.manual_seed(0)
    sizes = {f"{part}_{name}": n for part in ("encoder", "decoder") for name, n in (("ffn_dim", 256), ("layers", 2))}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": BEGIN}
    config = WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=128,
        max_source_positions=100,
        init_std=0.15,  # so that greedy tokens differ from one another
        suppress_tokens=None,
        begin_suppress_tokens=None,
        **sizes,
        **heads,
        **tokens,
    )
    WhisperForConditionalGeneration(config).save_pretrained(folder)
    special = [f"<|{name}|>" for name in ("endoftext", "startoftranscript", "en", "transcribe", "notimestamps")]
    names = {name: 2 + i for i, name in enumerate(special)}
    names |= {f"t{i}": i for i in range(VOCABULARY) if i not in names.values()}
    paths = folder / "vocab.json", folder / "merges.txt"
    paths[0].write_text(json.dumps(names))
    paths[1].write_text("#version: 0.2\n")
    ends: Any = dict.fromkeys(("unk_token", "bos_token", "eos_token"), special[0])
    words = WhisperTokenizer(*map(str, paths), **ends, additional_special_tokens=special[1:])
    WhisperProcessor(WhisperFeatureExtractor(chunk_length=2), words).save_pretrained(folder)
    return folder


def sounds(count: int) -> list[np.ndarray]:
    """Sums of five tones each."""
    found = []
    for i in range(count):
        drawn, time = np.random.default_rng(i), np.arange(int(RATE * (0.6 + 0.2 * i))) / RATE
        tones = [drawn.normal() * np.sin(2 * np.pi * f * time) for f in drawn.uniform(80, 4000, 5)]
        found.append(np.sum(tones, axis=0).astype(np.float32))
    return found


def transcript_prompts() -> list[list[int]]:
    """The first tokens of transcripts."""
    return [[BEGIN, *(4 + 7 * i for i in range(count))] for count in (0, 2, 5, 30)]


def expected_transcripts(folder: Path, count: int, given: list[list[int]]) -> list[list[int]]:
    """Greedy tokens, without what transformers' own generation adds for speech."""
    from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

    model = WhisperForConditionalGeneration.from_pretrained(folder, attn_implementation="eager").eval()
    extract, found = WhisperFeatureExtractor.from_pretrained(folder), []
    for sound, prompt in zip(sounds(len(given)), given, strict=True):
        heard = extract(sound, sampling_rate=RATE, return_tensors="pt").input_features
        tokens = list(prompt)
        with torch.no_grad():
            for _ in range(count):
                logits = model(input_features=heard, decoder_input_ids=torch.tensor([tokens])).logits
                tokens.append(int(logits[0, -1].argmax()))
        found.append(tokens[len(prompt) :])
    return found
