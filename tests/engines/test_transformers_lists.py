"""Models whose indexer lists the tokens that a row sees (DeepSeek V3.2, GLM-5), with a PagedCache and without."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from hf_models import after_one_prompt, greedy, left_padded, make_config, make_model

from flashpage import RunError, hf
from flashpage.engines.transformers import indexer, latents, lists, plans
from flashpage.engines.transformers.forward import attention
from flashpage.wrappers.base import Attention

pytestmark = pytest.mark.usefixtures("quick_kernels")

LENGTHS = [13, 5, 21]
SHORT, LONG = 6, 24  # topk: below most prompts, and above all of them but below their last tokens
NEW_TOKENS = 16
CLASSES = [name for name in ("GlmMoeDsaConfig", "DeepseekV32Config") if hasattr(transformers, name)]
NAN = float("nan")


def has_pages() -> bool:
    """Whether transformers' cache gets the latent rows of these models (5.23) or what they expand to (5.17)."""
    return "DeepseekV32Config" in CLASSES and make("DeepseekV32Config").layer_types[0] == indexer.LAYER_TYPE


def make(config_class: str, topk: int = SHORT, **changes: Any) -> Any:
    return make_config("deepseek-v3", config_class=config_class, **indexer_sizes(topk), **changes)


def indexer_sizes(topk: int) -> dict[str, int]:
    """With two heads many scores would be zero, and torch.topk chooses among equal ones by the number of columns."""
    return {"index_topk": topk, "index_n_heads": 8, "index_head_dim": 128}


def pair(config_class: str, topk: int, **changes: Any) -> tuple[Any, Any]:
    """A model, and its weights under eager attention."""
    hf.register()
    options = {"config_class": config_class, **indexer_sizes(topk), **changes}
    eager, model = (make_model("deepseek-v3", implementation=name, **options) for name in ("eager", hf.NAME))
    model.load_state_dict(eager.state_dict())
    return model, eager


paged = pytest.mark.skipif(not has_pages(), reason="transformers caches the expanded keys of these models")


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    return pair("DeepseekV32Config", SHORT)


@pytest.mark.parametrize("config_class", CLASSES)
def test_without_pages(config_class: str) -> None:
    model, eager = pair(config_class, SHORT)
    inputs = left_padded(LENGTHS)
    assert torch.equal(greedy(model, inputs, 12), greedy(eager, inputs, 12))


@paged
@pytest.mark.parametrize("config_class", CLASSES)
@pytest.mark.parametrize(("topk", "page_size"), [(SHORT, 4), (LONG, 4), (SHORT, 16)])
def test_tokens(config_class: str, topk: int, page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run reads nothing but the listed tokens: all other memory is NaN. Layers share a plan."""
    model, eager = pair(config_class, topk)
    inputs, widths, expanded, planned = left_padded(LENGTHS), [], [], []
    run, handed_on, plan = plans.Planned.run_lists, latents._handed_on, Attention.plan

    def run_lists(self: Any, layer: Any, q: torch.Tensor, rows: torch.Tensor, listed: torch.Tensor) -> torch.Tensor:
        widths.append(listed.shape)
        used = listed[listed >= 0].long()
        others = torch.full_like(rows, NAN)
        others.flatten(0, 1)[used] = rows.flatten(0, 1)[used]
        return run(self, layer, q, others, listed)

    def count(layer: Any, expand: Any, module: Any, new: torch.Tensor, rotated: torch.Tensor) -> Any:
        return handed_on(layer, lambda *args: (expanded.append(new.shape[2]), expand(*args))[1], module, new, rotated)

    monkeypatch.setattr(plans.Planned, "run_lists", run_lists)
    monkeypatch.setattr(latents, "_handed_on", count)
    monkeypatch.setattr(Attention, "plan", lambda *args, **given: (planned.append(args[0]), plan(*args, **given))[1])
    cache = hf.PagedCache(model.config, page_size=page_size, num_pages=60)
    tokens = greedy(model, inputs, NEW_TOKENS, past_key_values=cache)
    expected = greedy(eager, inputs, NEW_TOKENS)
    assert expected.unique().numel() > NEW_TOKENS, "the model says too few words for a comparison"
    assert torch.equal(tokens, expected)
    assert cache.table.lengths.tolist() == [length + NEW_TOKENS - 1 for length in LENGTHS]
    layers = model.config.num_hidden_layers
    longest = max(LENGTHS)
    steps = [columns for columns in range(longest, longest + NEW_TOKENS) if columns > topk]
    rows = [sum(LENGTHS) if columns == longest else len(LENGTHS) for columns in steps]
    assert widths == [(count, topk) for count in rows for _ in range(layers)]
    assert expanded == ([longest] * layers if longest <= topk else [])
    assert len(planned) == NEW_TOKENS


@paged
def test_memory_of_no_token_is_not_read(models: tuple[Any, Any]) -> None:
    """Pages are anywhere in the pool; a cache that was reset serves a batch of another size."""
    model, eager = models
    cache = hf.PagedCache(model.config, page_size=4, num_pages=60)
    greedy(model, left_padded([9, 4]), 8, past_key_values=cache)
    cache.reset()
    random.Random(0).shuffle(cache.table._free)
    for layer in cache.layers:
        layer.keys.fill_(NAN)
        layer.indexer_keys.fill_(NAN)
    inputs = left_padded(LENGTHS)
    assert torch.equal(greedy(model, inputs, 12, past_key_values=cache), greedy(eager, inputs, 12))


@paged
def test_keys_of_an_indexer_are_kept_in_order(models: tuple[Any, Any]) -> None:
    """Keys of 200 steps, of which some are removed; memory grows several times."""
    layer = hf.PagedCache(models[0].config).layers[0]
    expected = torch.zeros(2, 0, 3)
    for step in range(200):
        new = torch.full((2, 1 + step % 3, 3), float(step))
        expected = torch.cat([expected, new], 1)
        assert torch.equal(layer.update_indexer(new), expected)
        if step % 7 == 0:
            expected = expected[:, :-1]
            layer.shorten(expected.shape[1])


@paged
def test_layers_that_share_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists become places once for all layers that share them; a layer without an indexer has no keys of one."""
    model, eager = pair("GlmMoeDsaConfig", SHORT, indexer_types=["full", "shared", "full"])
    made, slots = [], lists._slots
    monkeypatch.setattr(lists, "_slots", lambda *args: (made.append(args), slots(*args))[1])
    cache, inputs = hf.PagedCache(model.config, page_size=4), left_padded(LENGTHS)
    assert torch.equal(greedy(model, inputs, 12, past_key_values=cache), greedy(eager, inputs, 12))
    assert [layer.indexer_keys is not None for layer in cache.layers] == [True, False, True]
    assert len(made) == 2 * 12


@paged
def test_a_prompt_in_pieces(models: tuple[Any, Any]) -> None:
    """Several rows a request after cached ones; the first piece is not longer than topk."""
    model, eager = models
    inputs, cache = left_padded(LENGTHS), hf.PagedCache(model.config, page_size=4)
    tokens = greedy(model, inputs, 12, past_key_values=cache, prefill_chunk_size=SHORT)
    assert torch.equal(tokens, greedy(eager, inputs, 12))


@paged
def test_beams_and_candidates(models: tuple[Any, Any]) -> None:
    """Rows of the cache are copied, and columns removed; the indexer's keys follow."""
    model, eager = models
    inputs = left_padded(LENGTHS)
    options = {"num_beams": 3, "num_return_sequences": 2}
    beams = greedy(model, inputs, 12, past_key_values=hf.PagedCache(model.config, page_size=4), **options)
    assert torch.equal(beams, greedy(eager, inputs, 12, **options))
    ids = left_padded([SHORT])["input_ids"].repeat(1, 3)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    cache = hf.PagedCache(model.config, page_size=4)
    tokens = greedy(model, inputs, 20, past_key_values=cache, prompt_lookup_num_tokens=5)
    assert torch.equal(tokens, greedy(eager, inputs, 20))


@paged
def test_a_prompt_is_computed_once(models: tuple[Any, Any]) -> None:
    model, eager = models
    cache, inputs = after_one_prompt(model)
    assert torch.equal(greedy(model, inputs, 9, past_key_values=cache), greedy(eager, inputs, 9))


@paged
@pytest.mark.parametrize("topk", [SHORT, LONG])
def test_a_tree_after_a_prompt(topk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A 4-D mask over cached rows; lists are read even if they have all tokens."""
    model, eager = pair("DeepseekV32Config", topk)
    listed, run = [], lists.run
    monkeypatch.setattr(lists, "run", lambda step, *args: (listed.append(step.length), run(step, *args))[1])
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
    assert listed == [columns for columns in (11, 16) for _ in model.model.layers if columns == 16 or columns > topk]


@paged
def test_padding_anywhere(models: tuple[Any, Any]) -> None:
    """Prompts with padding at their end and between their tokens, then two more tokens at a time."""
    ids = left_padded([20, 20])["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, 9:14], mask[1, 3] = 0, 0
    found = []
    for model, cache in zip(models, (hf.PagedCache(models[0].config, page_size=4), None), strict=True):
        with torch.no_grad():
            first = model(ids[:, :14], attention_mask=mask[:, :14], past_key_values=cache, use_cache=True)
            steps, past = [first.logits], first.past_key_values
            for end in (16, 18, 20):
                steps.append(model(ids[:, end - 2 : end], attention_mask=mask[:, :end], past_key_values=past).logits)
        found.append(torch.cat(steps, 1)[mask.bool()])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@paged
def test_wrong_pages_change_tokens(models: tuple[Any, Any]) -> None:
    """Shows that the comparisons of these tests can fail."""
    model, eager = models
    inputs = left_padded([20, 20])
    cache = hf.PagedCache(model.config, page_size=4)
    first = greedy(model, inputs, 4, past_key_values=cache)
    cache.table.pages[0], cache.table.pages[1] = cache.table.pages[1], cache.table.pages[0]
    ids = torch.cat([inputs["input_ids"], first], dim=1)
    more = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    assert not torch.equal(greedy(model, more, 9, past_key_values=cache), greedy(eager, more, 9))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"write_index": object()}, "pass no past_key_values, and call generate"),
        ({"sliding_window": 4}, "sliding_window=4 with indices: pass None"),
        ({"indices": torch.zeros(3, 2).int()}, r"indices has shape \(3, 2\): pass \[batch, 3, topk\]"),
        ({"indices": torch.full((1, 3, 2), 5)}, "indices has 5 but each request has 5 tokens: pass tokens from 0 to 4"),
        ({"indices": torch.tensor([[[0, -1]] * 3])}, "indices has -1 but each request has 5 tokens"),
        ({"attention_mask": torch.full((1, 1, 3, 5), -0.5)}, "attention_mask adds numbers to the scores"),
    ],
)
def test_lists_that_are_refused(change: dict[str, Any], says: str) -> None:
    q, k = torch.zeros(1, 4, 3, 16), torch.zeros(1, 4, 5, 16)
    given = {"attention_mask": None, "indices": torch.zeros(1, 3, 2, dtype=torch.int32), "is_causal": True}
    with pytest.raises(RunError, match=says):
        attention(torch.nn.Module(), q, k, k, **given | change)


@pytest.mark.skipif(has_pages(), reason="transformers caches latent rows of these models")
def test_pages_of_expanded_keys_are_refused() -> None:
    with pytest.raises(RunError, match="layers of deepseek_sparse_attention"):
        hf.PagedCache(make(CLASSES[0]))


@paged
def test_refused(models: tuple[Any, Any]) -> None:
    model, eager = models
    inputs, cache = left_padded(LENGTHS), hf.PagedCache(model.config)
    one = torch.ones(3, 1, dtype=torch.int64)
    with torch.no_grad():
        with pytest.raises(RunError, match=r"set_attn_implementation\(flashpage.hf.NAME\)"):
            eager(**inputs, past_key_values=cache)
        cache.reset()
        model(**inputs, past_key_values=cache)
        with pytest.raises(RunError, match="the batch is 2 but the cache holds 3 requests"):
            model(input_ids=one[:2], past_key_values=cache)
        with pytest.raises(RunError, match="attention_mask=None but the cache was filled without its padding"):
            model(input_ids=one, past_key_values=cache)
    with pytest.raises(RunError, match="layers of indexed_attention: pass no past_key_values"):
        hf.PagedCache(make("HYV4Config"))


@paged
def test_lists_of_pages_that_are_refused(models: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = models
    inputs, layer = left_padded(LENGTHS), model.model.layers[1]
    with torch.no_grad():
        beyond = torch.full((3, 21, SHORT), 21)
        monkeypatch.setattr(layer.self_attn.indexer, "forward", lambda *args, **given: beyond)
        with pytest.raises(RunError, match="indices has 21 but each request has 21 tokens"):
            model(**inputs, past_key_values=hf.PagedCache(model.config))
        monkeypatch.undo()

        def copied(module: Any, args: Any, given: dict[str, Any]) -> Any:
            return args, given | {"attention_mask": given["attention_mask"].clone()}

        hook = layer.register_forward_pre_hook(copied, with_kwargs=True)
        with pytest.raises(RunError, match="one layer has a 4-D mask and another has padding"):
            model(**inputs, past_key_values=hf.PagedCache(model.config))
        hook.remove()
