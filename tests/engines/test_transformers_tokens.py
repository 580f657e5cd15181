"""Greedy tokens of tiny transformers models equal those of eager attention, in fp32, with every cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import hf_copy
from hf_models import MODELS, batch_options, greedy, left_padded, make_model, prompts_of

from flashpage import hf
from flashpage.wrappers.base import Attention

NEW_TOKENS = 24
LENGTHS = [13, 5, 21, 8]
PAGED = [name for name in MODELS if name != "deepseek-v3"]  # deepseek-v3 caches latents


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    hf.register()


@pytest.fixture(scope="module")
def expected() -> dict[str, tuple[Any, torch.Tensor]]:
    """Each model, and the tokens of eager attention for the padded batch."""
    made = {}
    for name in MODELS:
        model = make_model(name)
        tokens = greedy(model, left_padded(LENGTHS), NEW_TOKENS)
        assert tokens.unique().numel() > NEW_TOKENS, f"{name} says too few words for a comparison"
        model.set_attn_implementation(hf.NAME)
        made[name] = model, tokens
    return made


@pytest.mark.parametrize("name", MODELS)
def test_transformers_own_cache(name: str, expected: Any) -> None:
    model, tokens = expected[name]
    assert torch.equal(greedy(model, left_padded(LENGTHS), NEW_TOKENS), tokens)


@pytest.mark.parametrize("name", PAGED)
@pytest.mark.parametrize("page_size", [4, 16])
def test_paged_cache(name: str, page_size: int, expected: Any) -> None:
    model, tokens = expected[name]
    cache = hf.PagedCache(model.config, page_size=page_size)
    assert torch.equal(greedy(model, left_padded(LENGTHS), NEW_TOKENS, past_key_values=cache), tokens)
    # Padding is not stored, and neither is the last new token, which no row attends to.
    assert cache.table.lengths.tolist() == [length + NEW_TOKENS - 1 for length in LENGTHS]


@pytest.mark.parametrize("name", PAGED)
def test_continuous_batching(name: str, expected: Any) -> None:
    """More requests than fit at once, prefilled in pieces of at most 16 tokens."""
    model, tokens = expected[name]
    prompts = prompts_of(left_padded(LENGTHS))
    with torch.no_grad():
        outputs = model.generate_batch(
            prompts, **batch_options(NEW_TOKENS, page_size=8, num_blocks=12, max_batch_tokens=16)
        )
    assert [output.generated_tokens for output in outputs.values()] == tokens.tolist()
    assert model.config._attn_implementation == hf.NAME


@pytest.mark.parametrize(("name", "kinds"), [("llama", 1), ("gemma3", 2)])
def test_batches_are_planned_once(name: str, kinds: int, expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One plan a forward for layers with full attention, and one for layers with a window."""
    model, _ = expected[name]
    plans, forwards, plan = [], [], Attention.plan

    def counted(self: Any, *args: Any) -> None:
        plans.append(self)
        plan(self, *args)

    monkeypatch.setattr(Attention, "plan", counted)
    hook = model.model.register_forward_pre_hook(lambda module, args: forwards.append(module))
    model.generate_batch(
        prompts_of(left_padded(LENGTHS)), **batch_options(8, page_size=8, num_blocks=32, max_batch_tokens=16)
    )
    hook.remove()
    assert len(forwards) > 8
    assert len(plans) == kinds * len(forwards)


def test_a_trained_model_in_bfloat16() -> None:
    """Its tokens are certain enough that rounding does not change them, but a wrong page does."""
    model = hf_copy.trained("cpu", length=80, batch=16, vocab_size=64).bfloat16().eval()
    model.set_attn_implementation(hf.NAME)
    hf_copy.check_copies(model, new_tokens=64)
    hf_copy.check_copies(hf_copy.windowed(model, 24), new_tokens=64)
