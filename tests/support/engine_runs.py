"""Small models and requests for tests of the engine, and their outputs without the engine."""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Sequence

import torch

from flashpage.demo.latent_model import LatentConfig, LatentModel
from flashpage.demo.model import Config, Llama
from flashpage.demo.reference import causal_attention, check_tokens
from flashpage.engine import Engine, Request

SMALL = Config(vocabulary=512, hidden=128, num_layers=2, num_q_heads=4, num_kv_heads=2, head_dim=64, intermediate=256)
LATENT = LatentConfig(vocabulary=512, hidden=128, num_layers=2, num_q_heads=4, intermediate=256)


def small_model(device: str, seed: int = 0, config: Config = SMALL) -> Llama:
    """fp32 on the CPU, where tokens are exact; fp16 on a card."""
    kind = LatentModel if isinstance(config, LatentConfig) else Llama
    return kind(config, torch.device(device), torch.float32 if device == "cpu" else torch.float16, seed)


def prompts(lens: Sequence[int], seed: int = 0, shared: int = 0) -> list[list[int]]:
    """Random requests; `shared`: number of first tokens that all of them have."""
    rng = random.Random(seed)
    beginning = [rng.randrange(SMALL.vocabulary) for _ in range(shared)]
    return [(beginning + [rng.randrange(SMALL.vocabulary) for _ in range(n)])[:n] for n in lens]


def alone(model: Llama, prompt: list[int], new_tokens: int) -> list[int]:
    """Greedy tokens, unbatched and uncached: the whole model runs over all tokens for each new token."""
    tokens = list(prompt)
    for _ in range(new_tokens):
        numbers = torch.tensor(tokens, device=model.device)
        attend = functools.partial(causal_attention, scale=model.config.sm_scale)
        hidden = model.forward(numbers, torch.arange(len(tokens), device=model.device), attend)
        tokens.append(int(model.logits(hidden[-1:]).argmax()))
    return tokens[len(prompt) :]


def check(model: Llama, requests: Sequence[Request], *, least: int) -> None:
    """On the CPU every token must be the reference's; on a card a few may be within rounding of it."""
    verdict = check_tokens(model, list(requests))
    assert verdict.total >= least and verdict.wrong == 0
    assert verdict.ties <= (0 if model.dtype is torch.float32 else max(2, verdict.total // 20))


def check_pool(engine: Engine) -> None:
    """Every block is free or has as many owners as requests that hold it; hashes and blocks refer to each other."""
    pool, held = engine.blocks, Counter(block for r in engine.scheduler.running for block in r.blocks)
    assert [held[block] for block in range(pool.num_blocks)] == pool._owners
    assert set(pool._free) == set(range(1, pool.num_blocks)) - set(held)
    assert {block: known for known, block in pool._block_of.items()} == pool._hash_of
    rows = [request.row for request in engine.scheduler.running]
    assert len(set(rows)) == len(rows) and engine.table.num_free == engine.config.max_requests - len(rows)


def check_idle(engine: Engine) -> None:
    """All blocks and rows are free again."""
    assert not engine.has_work
    assert engine.table.num_free == engine.config.max_requests
    assert engine.blocks.num_free == engine.config.num_blocks - 1
