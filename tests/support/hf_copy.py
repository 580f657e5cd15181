"""A small Llama that learns to repeat a pattern, with margins that 16-bit arithmetic does not cross."""

from __future__ import annotations

from typing import Any

import torch
from hf_models import greedy, make_model

from flashpage import hf

PERIOD = 8
_MOST_STEPS, _ENOUGH = 1500, 0.015
# Short wavelengths tell near positions apart, so that the model learns the task several times sooner.
_ROPE = {"rope_theta": 20.0, "rope_type": "default"}


def patterns(count: int, repeats: int, vocabulary: int, device: str, seed: int) -> torch.Tensor:
    """[count, PERIOD * repeats]: random patterns, each repeated several times."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, vocabulary, (count, PERIOD), generator=generator).repeat(1, repeats).to(device)


def trained(device: str, length: int, batch: int, **sizes: int) -> Any:
    """A model in fp32, trained on rows of `length` tokens until it is certain of all tokens after the first pattern."""
    model = make_model("llama", num_hidden_layers=2, initializer_range=0.05, rope_parameters=_ROPE, **sizes).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    vocabulary = model.config.vocab_size
    for step in range(_MOST_STEPS):
        ids = patterns(batch, length // PERIOD, vocabulary, device, seed=step)
        logits = model(input_ids=ids).logits[:, PERIOD - 1 : -1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, PERIOD:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss.item() < _ENOUGH:
            return model
    raise AssertionError(f"the loss is still {loss.item():.4f} after {_MOST_STEPS} steps")


def windowed(model: Any, window: int) -> Any:
    """A model with the same weights whose layers see `window` tokens, enough for several patterns."""
    sizes = {
        name: getattr(model.config, name) for name in ("vocab_size", "head_dim", "num_hidden_layers", "rope_parameters")
    }
    other = make_model("mistral", sliding_window=window, **sizes).to(model.device, model.dtype)
    other.load_state_dict(model.state_dict())
    other.set_attn_implementation(model.config._attn_implementation)
    return other


def task(model: Any, new_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts of two patterns each, and the tokens that follow them."""
    device, vocabulary = str(model.device), model.config.vocab_size
    repeats = new_tokens // PERIOD
    return patterns(3, 2, vocabulary, device, seed=-1), patterns(3, repeats, vocabulary, device, seed=-1)


def copied(model: Any, new_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Checks the model with transformers' own cache against the patterns."""
    prompts, goes_on = task(model, new_tokens)
    return greedy(model, {"input_ids": prompts, "attention_mask": torch.ones_like(prompts)}, new_tokens), goes_on


def check_copies(model: Any, new_tokens: int) -> None:
    """Checks that the model continues its prompts' patterns from a paged cache; it cannot if a page is wrong."""
    prompts, goes_on = task(model, new_tokens)
    assert torch.equal(_continued(model, prompts, new_tokens, is_corrupted=False), goes_on)
    assert not torch.equal(_continued(model, prompts, new_tokens, is_corrupted=True), goes_on)


def _continued(model: Any, prompt: torch.Tensor, new_tokens: int, is_corrupted: bool) -> torch.Tensor:
    """Generates in two calls over one cache; between them the first row may get pages of the second."""
    cache = hf.PagedCache(model.config, page_size=4)
    first = greedy(
        model, {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}, PERIOD, past_key_values=cache
    )
    if is_corrupted:
        cache.table.pages[0][1:5] = cache.table.pages[1][1:5]
    ids = torch.cat([prompt, first], dim=1)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return torch.cat([first, greedy(model, inputs, new_tokens - PERIOD, past_key_values=cache)], dim=1)
