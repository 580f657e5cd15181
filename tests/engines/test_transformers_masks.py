"""Masks other than padding, attention that is not causal, and arguments that are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from hf_models import VOCABULARY, greedy, left_padded, make_model

from flashpage import RunError, hf

pytestmark = pytest.mark.usefixtures("quick_kernels")


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    hf.register()


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    """A model with a window in all layers, under eager attention and under ours."""
    ours = make_model("mistral", implementation=hf.NAME)
    eager = make_model("mistral")
    eager.load_state_dict(ours.state_dict())
    return eager, ours


def tokens(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model: Any, **inputs: Any) -> torch.Tensor:
    return model(**inputs).logits


def additive(mask: torch.Tensor) -> torch.Tensor:
    """The mask as numbers that eager attention adds to the scores."""
    return torch.where(mask, 0.0, torch.finfo(torch.float32).min)


def test_padding_anywhere(pair: Any) -> None:
    """Padding left, right and absent, in one forward without a cache."""
    eager, ours = pair
    mask = torch.ones(3, 12, dtype=torch.int64)
    mask[0, :5], mask[1, 9:] = 0, 0
    ids = tokens(3, 12)
    expected, got = (logits(model, input_ids=ids, attention_mask=mask, use_cache=False) for model in (eager, ours))
    torch.testing.assert_close(got[mask.bool()], expected[mask.bool()])


def test_inference_mode(pair: Any) -> None:
    """Masks that are made there count no writes."""
    eager, ours = pair
    with torch.inference_mode():
        ids, mask = tokens(2, 9), torch.ones(2, 9, dtype=torch.int64)
        mask[0, :4] = 0
        expected, got = (model(input_ids=ids, attention_mask=mask, use_cache=False).logits for model in (eager, ours))
    torch.testing.assert_close(got[mask.bool()], expected[mask.bool()])


@pytest.mark.parametrize("is_paged", [False, True])
@pytest.mark.parametrize("as_numbers", [False, True])
def test_a_tree_after_a_prompt(is_paged: bool, as_numbers: bool) -> None:
    """A tree of guesses after a prompt, as in speculative decoding."""
    eager, ours = make_model("llama"), make_model("llama", implementation=hf.NAME)
    ids, prompt_length = tokens(2, 14), 9
    mask = torch.rand(1, 1, 5, 14, generator=torch.Generator().manual_seed(2)) < 0.5
    mask[..., :2] = True
    found = []
    for model in (eager, ours):
        cache = hf.PagedCache(model.config) if is_paged and model is ours else transformers.DynamicCache()
        logits(model, input_ids=ids[:, :prompt_length], past_key_values=cache)
        given = additive(mask) if as_numbers or model is eager else mask
        found.append(logits(model, input_ids=ids[:, prompt_length:], attention_mask=given, past_key_values=cache))
    torch.testing.assert_close(found[1], found[0])


def test_a_mask_says_all_that_is_visible(pair: Any) -> None:
    """Tokens right of a row and left of its window are visible too."""
    mask = torch.rand(2, 1, 14, 14, generator=torch.Generator().manual_seed(2)) < 0.5
    mask[..., 0] = True
    masks = {"eager": additive(mask), hf.NAME: mask}
    found = [
        logits(
            model,
            input_ids=tokens(2, 14),
            attention_mask=masks[model.config._attn_implementation],
            use_cache=False,
        )
        for model in pair
    ]
    torch.testing.assert_close(found[1], found[0])


def test_sequences_joined_in_one_row(pair: Any) -> None:
    """Sequences begin where positions restart, or where given ends say; results equal those of each sequence alone."""
    _, ours = pair
    lengths = [7, 12, 3]
    ids = tokens(1, sum(lengths))
    alone = torch.cat([logits(ours, input_ids=part) for part in ids.split(lengths, dim=1)], dim=1)
    positions = torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)
    by_positions = logits(ours, input_ids=ids, position_ids=positions, use_cache=False)
    ends = torch.tensor([0, 7, 19, 22], dtype=torch.int32)
    by_ends = logits(ours, input_ids=ids, cu_seq_lens_q=ends, cu_seq_lens_k=ends, use_cache=False)
    torch.testing.assert_close(by_positions, alone)
    torch.testing.assert_close(by_ends, alone)


def test_chunks() -> None:
    """Layers in which a row sees only its own chunk of 8, which needs a mask."""
    sizes = {"attention_chunk_size": 8, "num_local_experts": 2, "intermediate_size_mlp": 64}
    layers = {"layer_types": ["chunked_attention", "full_attention", "chunked_attention"]}
    model = make_model("llama", config_class="Llama4TextConfig", **sizes, **layers)
    expected = greedy(model, left_padded([13, 5, 21]), 12)
    model.set_attn_implementation(hf.NAME)
    assert torch.equal(greedy(model, left_padded([13, 5, 21]), 12), expected)


@pytest.mark.parametrize("implementation", ["eager", hf.NAME])
def test_encoders_see_both_sides(implementation: str) -> None:
    """Encoders are compared with each sequence alone."""
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    torch.manual_seed(0)
    model = transformers.BertModel._from_config(config, attn_implementation=implementation).eval()
    inputs = left_padded([9, 4])
    with torch.no_grad():
        states = model(**inputs).last_hidden_state[1, -4:]
        alone = model(
            input_ids=inputs["input_ids"][1:, -4:], position_ids=torch.arange(5, 9).unsqueeze(0)
        ).last_hidden_state[0]
    torch.testing.assert_close(states, alone)


def test_static_caches_are_refused(pair: Any) -> None:
    with pytest.raises(RunError, match="StaticCache"):
        greedy(pair[1], left_padded([5]), 4, cache_implementation="static")


def test_padding_is_not_forgotten_under_continuous_batching() -> None:
    model = make_model("mistral", implementation=hf.BATCHING_NAME)
    with pytest.raises(RunError, match="under continuous batching"):
        logits(model, **left_padded([5, 3]))


def test_registering_twice_wraps_once() -> None:
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

    choose = ContinuousBatchingManager.switch_to_cb_friendly_attn
    hf.register()
    assert ContinuousBatchingManager.switch_to_cb_friendly_attn is choose


def test_gradients_are_refused(pair: Any) -> None:
    with pytest.raises(RunError, match=r"torch\.no_grad"):
        pair[1](input_ids=tokens(1, 4))


def test_weights_are_refused(pair: Any) -> None:
    with pytest.raises(RunError, match="attn_implementation='eager'"):
        logits(pair[1], input_ids=tokens(1, 4), output_attentions=True)


def test_masks_of_numbers_are_refused(pair: Any) -> None:
    with pytest.raises(RunError, match="adds numbers to the scores"):
        logits(pair[1], input_ids=tokens(1, 4), attention_mask=torch.full((1, 1, 4, 4), 0.5))


def test_masks_of_heads_are_refused(pair: Any) -> None:
    with pytest.raises(RunError, match=r"has shape \(1, 4, 4, 4\): pass one for all heads, \(1, 1, 4, 4\)"):
        logits(pair[1], input_ids=tokens(1, 4), attention_mask=torch.ones(1, 4, 4, 4, dtype=torch.bool))
