"""A PagedCache of models with latent rows (MLA): rows are cached, prompts attend expanded, later tokens absorbed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from hf_models import after_one_prompt, greedy, left_padded, make_kimi, make_model

from flashpage import CapabilityError, RunError, hf
from flashpage.engines.transformers import latents

pytestmark = pytest.mark.usefixtures("quick_kernels")

LENGTHS = [13, 5, 21]


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    """A model, and its weights under eager attention."""
    hf.register()
    model, eager = make_model("deepseek-v3", implementation=hf.NAME), make_model("deepseek-v3")
    eager.load_state_dict(model.state_dict())
    return model, eager


@pytest.fixture
def expansions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of tokens that calls of expand_kv expand."""
    found: list[int] = []
    original = latents._handed_on

    def handed_on(layer: Any, expand: Any, module: Any, rows: torch.Tensor, rotated: torch.Tensor) -> Any:
        counted = lambda *args: (found.append(rows.shape[2]), expand(*args))[1]
        return original(layer, counted, module, rows, rotated)

    monkeypatch.setattr(latents, "_handed_on", handed_on)
    return found


def test_rows_are_cached_and_only_prompts_expanded(models: tuple[Any, Any], expansions: list[int]) -> None:
    """Pages are anywhere in the pool, and all memory that holds no token is NaN."""
    model, eager = models
    config, inputs = model.config, left_padded(LENGTHS)
    cache = hf.PagedCache(config, page_size=4, num_pages=60)
    greedy(model, inputs, 2, past_key_values=cache)
    cache.reset()
    for layer in cache.layers:
        assert layer.keys.shape == (60, 4, config.kv_lora_rank + config.qk_rope_head_dim)
        layer.keys.fill_(float("nan"))
    del expansions[:]
    assert torch.equal(greedy(model, inputs, 12, past_key_values=cache), greedy(eager, inputs, 12))
    assert expansions == [max(LENGTHS)] * config.num_hidden_layers


def test_glm_has_the_same_layers() -> None:
    hf.register()
    model = make_model("deepseek-v3", config_class="Glm4MoeLiteConfig")
    inputs = left_padded(LENGTHS)
    expected = greedy(model, inputs, 12)
    model.set_attn_implementation(hf.NAME)
    assert torch.equal(greedy(model, inputs, 12, past_key_values=hf.PagedCache(model.config)), expected)


@pytest.mark.skipif(not hasattr(transformers, "Kimi_K25Config"), reason="transformers has no Kimi K2.5")
def test_kimi_has_a_text_model_of_the_same_layers() -> None:
    model, inputs = make_kimi(), left_padded(LENGTHS)
    inputs["input_ids"] = torch.where(inputs["attention_mask"].bool(), inputs["input_ids"].clamp(min=6), 0)
    expected = greedy(model, inputs, 12)
    hf.register()
    model.set_attn_implementation({"text_config": hf.NAME})
    cache = hf.PagedCache(model.config, page_size=4)
    assert torch.equal(greedy(model, inputs, 12, past_key_values=cache), expected)
    assert cache.layers[0].keys.shape[-1] == 32 + 64


def test_a_prompt_is_computed_once(models: tuple[Any, Any]) -> None:
    """Several rows a request attend to rows that are cached; copies of a cache go their own ways."""
    model, eager = models
    cache, inputs = after_one_prompt(model)
    assert torch.equal(greedy(model, inputs, 9, past_key_values=cache), greedy(eager, inputs, 9))


def test_a_tree_after_a_prompt(models: tuple[Any, Any]) -> None:
    """A 4-D mask over cached rows."""
    model, eager = models
    ids = left_padded([16, 16])["input_ids"]
    mask = torch.rand(1, 1, 5, 16, generator=torch.Generator().manual_seed(2)) < 0.5
    mask[..., :2] = True
    found = []
    for other, cache in ((eager, None), (model, hf.PagedCache(model.config, page_size=4))):
        given = torch.where(mask, 0.0, torch.finfo(torch.float32).min) if other is eager else mask
        with torch.no_grad():
            past = other(input_ids=ids[:, :11], past_key_values=cache, use_cache=True).past_key_values
            found.append(other(input_ids=ids[:, 11:], attention_mask=given, past_key_values=past).logits)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_a_corrupted_page_entry_changes_tokens(models: tuple[Any, Any]) -> None:
    """Shows that the comparisons of these tests can fail."""
    model, eager = models
    inputs = left_padded([20, 20])
    cache = hf.PagedCache(model.config, page_size=4)
    first = greedy(model, inputs, 4, past_key_values=cache)
    cache.table.pages[0][-2] = cache.table.pages[1][-2]
    ids = torch.cat([inputs["input_ids"], first], dim=1)
    more = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    assert not torch.equal(greedy(model, more, 9, past_key_values=cache), greedy(eager, more, 9))


def test_refused(models: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, eager = models
    cache = hf.PagedCache(model.config)
    ids = left_padded([6, 6])["input_ids"]
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache)
        cache.reset()
        with pytest.raises(RunError, match="did not reach flashpage's attention"):
            for _ in range(2):
                eager(input_ids=ids, past_key_values=cache)
        cache.reset()
        model(input_ids=ids, past_key_values=cache)
        monkeypatch.setattr(model.model.layers[0].self_attn.kv_b_proj, "bias", torch.nn.Parameter(torch.zeros(1)))
        with pytest.raises(CapabilityError, match="kv_b_proj is Linear"):
            latents.NewRows(cache.layers[0], model.model.layers[0].self_attn, ids, ids, is_first=False)._expansion(
                torch.zeros(1)
            )
    monkeypatch.setattr(transformers, "MODEL_MAPPING", {})
    with pytest.raises(RunError, match="deepseek_v3 caches latents, which"):
        hf.PagedCache(model.config)
