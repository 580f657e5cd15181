"""The paged cache of transformers models: one plan for each forward, pages shared and freed, errors."""

from __future__ import annotations

import copy
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from hf_models import VOCABULARY, greedy, left_padded, make_model

from flashpage import RunError, hf
from flashpage.engines.transformers.call import judge
from flashpage.engines.transformers.pages import PageTable
from flashpage.wrappers.base import Attention

LENGTHS = [13, 5, 21]


@pytest.fixture(scope="module")
def model() -> Any:
    """A model with a window in two of three layers."""
    hf.register()
    return make_model("gemma3", implementation=hf.NAME)


@pytest.fixture
def eager(model: Any) -> Any:
    """The model's weights under eager attention."""
    other = make_model("gemma3")
    other.load_state_dict(model.state_dict())
    return other


def pages_in_use(cache: hf.PagedCache) -> int:
    return len({page for own in cache.table.pages for page in own})


def test_the_guides_example_runs() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "guides" / "transformers.md").read_text()
    found = re.search(r"```python\n(import torch, flashpage\.hf\n.*?)```", page, re.DOTALL)
    assert found, "the guide has no example of flashpage.hf"
    names: dict[str, Any] = {}
    torch.manual_seed(0)
    exec(found[1], names)
    assert names["tokens"].shape == (2, 9 + 8)
    assert names["cache"].table.lengths.tolist() == [16, 16]


def test_one_plan_a_forward(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plans, plan = [], Attention.plan

    def counted(self: Any, *args: Any, **options: Any) -> None:
        plans.append(self)
        plan(self, *args, **options)

    monkeypatch.setattr(Attention, "plan", counted)
    greedy(model, left_padded(LENGTHS), 9, past_key_values=hf.PagedCache(model.config))
    assert len(plans) == 9


def test_memory_of_no_token_is_not_read(model: Any, eager: Any) -> None:
    """Pages are anywhere in the pool, and all memory that holds no token is NaN."""
    inputs = left_padded(LENGTHS)
    cache = hf.PagedCache(model.config, page_size=4, num_pages=60)
    greedy(model, inputs, 2, past_key_values=cache)
    cache.reset()
    assert pages_in_use(cache) == 0
    random.Random(0).shuffle(cache.table._free)
    for layer in cache.layers:
        layer.keys.fill_(float("nan"))
        layer.values.fill_(float("nan"))
    assert torch.equal(greedy(model, inputs, 20, past_key_values=cache), greedy(eager, inputs, 20))


def test_a_corrupted_page_entry_changes_tokens(model: Any, eager: Any) -> None:
    """Shows that the comparisons of these tests can fail."""
    inputs = left_padded([20, 20])
    expected = greedy(eager, inputs, 16)
    for is_corrupted in (False, True):
        cache = hf.PagedCache(model.config, page_size=4)
        first = greedy(model, inputs, 4, past_key_values=cache)
        if is_corrupted:
            cache.table.pages[0][-2] = cache.table.pages[1][-2]
        ids = torch.cat([inputs["input_ids"], first], dim=1)
        rest = greedy(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, 12, past_key_values=cache)
        assert torch.equal(torch.cat([first, rest], dim=1), expected) is not is_corrupted


def test_beams_share_pages(model: Any, eager: Any) -> None:
    inputs = left_padded(LENGTHS)
    cache = hf.PagedCache(model.config, page_size=4)
    beams = greedy(model, inputs, 12, past_key_values=cache, num_beams=4, num_return_sequences=2)
    assert torch.equal(beams, greedy(eager, inputs, 12, num_beams=4, num_return_sequences=2))
    assert pages_in_use(cache) < sum(len(own) for own in cache.table.pages)
    cache.reset()
    assert sorted(cache.table._free) == list(range(cache.table.num_pages))
    assert not any(cache.table._users)


def test_candidates_that_are_refused_are_cropped(model: Any, eager: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    crops, crop = [], hf.PagedCache.crop
    monkeypatch.setattr(hf.PagedCache, "crop", lambda self, count: (crops.append(count), crop(self, count)))
    ids = torch.randint(1, VOCABULARY, (1, 6), generator=torch.Generator().manual_seed(3)).repeat(1, 3)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    cache = hf.PagedCache(model.config, page_size=4)
    tokens = greedy(model, inputs, 20, past_key_values=cache, prompt_lookup_num_tokens=5)
    assert torch.equal(tokens, greedy(eager, inputs, 20))
    assert min(crops) < 0


def test_crop_counts_columns_of_padded_rows(model: Any) -> None:
    cache = hf.PagedCache(model.config, page_size=4)
    greedy(model, left_padded(LENGTHS), 4, past_key_values=cache)
    cache.crop(-3)  # the tokens that decoding added
    assert (cache.get_seq_length(), cache.table.lengths.tolist()) == (21, LENGTHS)
    cache.crop(-10)  # the second row had padding in five of these columns
    assert (cache.get_seq_length(), cache.table.lengths.tolist()) == (11, [3, 0, 11])
    assert [len(own) for own in cache.table.pages] == [1, 0, 3]


def test_a_prompt_is_computed_once(model: Any, eager: Any) -> None:
    """The prompt's pages serve every request that begins with it; the last page is copied when requests diverge."""
    prompt = left_padded([18])["input_ids"]
    ends = torch.randint(1, VOCABULARY, (3, 4), generator=torch.Generator().manual_seed(5))
    prefix = hf.PagedCache(model.config, page_size=4)
    with torch.no_grad():
        model(input_ids=prompt, past_key_values=prefix)
    cache = copy.deepcopy(prefix)
    cache.batch_repeat_interleave(3)
    assert pages_in_use(cache) == 5
    ids = torch.cat([prompt.repeat(3, 1), ends], dim=1)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(greedy(model, inputs, 12, past_key_values=cache), greedy(eager, inputs, 12))
    assert pages_in_use(cache) == 4 + 3 * 5
    assert prefix.table.lengths.tolist() == [18]


def test_layers_that_share_keys() -> None:
    """The last layer reuses another layer's keys."""
    hf.register()
    sizes = {"num_kv_shared_layers": 1, "vocab_size_per_layer_input": VOCABULARY}
    model = make_model("gemma3", config_class="Gemma3nTextConfig", **sizes)
    expected = greedy(model, left_padded(LENGTHS), 12)
    model.set_attn_implementation(hf.NAME)
    cache = hf.PagedCache(model.config, page_size=4)
    assert torch.equal(greedy(model, left_padded(LENGTHS), 12, past_key_values=cache), expected)


@pytest.mark.parametrize("limit", [None, 16])
def test_pages_hold_what_was_written(limit: int | None) -> None:
    """300 random changes of a table, compared with lists of each row's tokens. With few pages, some changes fail."""
    random_numbers, page_size, failures = random.Random(4), 4, 0
    table = PageTable(page_size, limit)
    table.start(3)
    rows: list[list[int]] = [[], [], []]
    written: dict[int, list[int]] = {}  # page: its tokens
    for step in range(300):
        change = random_numbers.random()
        if change < 0.6 or not any(rows):
            new = [random_numbers.randrange(7) for _ in rows]
            try:
                copies = table.extend(torch.tensor(new))
            except RunError:
                failures, new, copies = failures + 1, [0] * len(rows), []
            for source, target in copies:
                written[target] = list(written[source])
            for row, count, pages in zip(rows, new, table.pages, strict=True):
                for token in range(step * 10, step * 10 + count):
                    slots = written.setdefault(pages[len(row) // page_size], [0] * page_size)
                    slots[len(row) % page_size] = token
                    row.append(token)
        elif change < 0.8:
            removed = [random_numbers.randint(0, len(row)) // 2 for row in rows]
            table.shorten(torch.tensor(removed))
            rows = [row[: len(row) - count] for row, count in zip(rows, removed, strict=True)]
        else:
            chosen = [random_numbers.randrange(len(rows)) for _ in range(random_numbers.randint(1, 4))]
            table.select(torch.tensor(chosen))
            rows = [list(rows[row]) for row in chosen]
        read = [[token for page in pages for token in written[page]] for pages in table.pages]
        assert [tokens[: len(row)] for tokens, row in zip(read, rows, strict=True)] == rows
        assert table.lengths.tolist() == [len(row) for row in rows]
        used = [page for pages in table.pages for page in pages]
        assert [table._users[page] for page in used] == [used.count(page) for page in used]
        assert sorted({*used, *table._free}) == list(range(table.num_pages))
    assert (failures > 20) is (limit is not None)


def test_prefill_in_pieces(model: Any, eager: Any) -> None:
    inputs = left_padded(LENGTHS)
    cache = hf.PagedCache(model.config)
    tokens = greedy(model, inputs, 12, past_key_values=cache, prefill_chunk_size=6)
    assert torch.equal(tokens, greedy(eager, inputs, 12))


def test_rows_are_selected(model: Any) -> None:
    """Row 2 goes on as if it had been alone."""
    inputs = left_padded(LENGTHS)
    cache, alone = hf.PagedCache(model.config), hf.PagedCache(model.config)
    with torch.no_grad():
        model(**inputs, past_key_values=cache)
        cache.batch_select_indices(torch.tensor([2]))
        model(input_ids=inputs["input_ids"][2:], past_key_values=alone)
        next_ids = torch.tensor([[7]])
        logits = [model(input_ids=next_ids, past_key_values=c).logits for c in (cache, alone)]
    torch.testing.assert_close(*logits)


def test_full_pools_are_reported(model: Any) -> None:
    with pytest.raises(RunError, match="all num_pages=4 pages"):
        greedy(model, left_padded(LENGTHS), 2, past_key_values=hf.PagedCache(model.config, num_pages=4, page_size=4))


def test_a_full_pool_changes_nothing(model: Any) -> None:
    """Three rows share two pages, the second in part; two of the copies that a token needs do not fit."""
    ids, more = torch.arange(1, 7).unsqueeze(0), torch.tensor([[1], [2], [3]])
    found = []
    with torch.no_grad():
        for limit in (None, 3):
            cache = hf.PagedCache(model.config, page_size=4, num_pages=limit)
            model(input_ids=ids, past_key_values=cache)
            cache.batch_repeat_interleave(3)
            for _ in range(2 if limit else 0):
                with pytest.raises(RunError, match="all num_pages=3 pages"):
                    model(input_ids=more, past_key_values=cache)
                assert (cache.get_seq_length(), pages_in_use(cache)) == (6, 2)
            cache.table.limit = None
            found.append(model(input_ids=more, past_key_values=cache).logits)
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def test_layers_on_several_devices_are_reported(model: Any) -> None:
    """As `device_map="auto"` divides a model over cards."""
    cache = hf.PagedCache(model.config)
    options = dict.fromkeys(("dropout", "scaling", "sliding_window", "softcap", "s_aux", "position_bias"))
    for own, device in zip(cache.layers, ("cpu", "meta"), strict=False):
        q, k, v = (torch.empty(1, heads, 3, 32, device=device) for heads in (2, 2, 2))
        layer = judge(None, q, k, v, None, options | {"is_causal": True})
        own.update(k, v)
        if device == "cpu":
            own.store(layer, k, v)
        else:
            with pytest.raises(RunError, match=r"on several devices \(cpu and meta\): load the model on one device"):
                own.store(layer, k, v)


def test_a_mask_that_changes_is_reported(model: Any) -> None:
    cache = hf.PagedCache(model.config)
    inputs = left_padded(LENGTHS)
    with torch.no_grad():
        model(**inputs, past_key_values=cache)
        mask = torch.ones(3, inputs["input_ids"].shape[1] + 1, dtype=torch.int64)
        with pytest.raises(RunError, match="attention_mask has 22 tokens in row 0 but the cache will have 14"):
            model(input_ids=torch.ones(3, 1, dtype=torch.int64), attention_mask=mask, past_key_values=cache)


def test_another_batch_is_reported(model: Any) -> None:
    cache = hf.PagedCache(model.config)
    with torch.no_grad():
        model(input_ids=torch.ones(2, 3, dtype=torch.int64), past_key_values=cache)
        with pytest.raises(RunError, match="the batch is 3 but the cache holds 2"):
            model(input_ids=torch.ones(3, 3, dtype=torch.int64), past_key_values=cache)
        cache.reset()
        model(input_ids=torch.ones(3, 3, dtype=torch.int64), past_key_values=cache)


def test_another_attention_is_reported(eager: Any) -> None:
    with pytest.raises(RunError, match=r"set_attn_implementation\(flashpage.hf.NAME\)"):
        greedy(eager, left_padded(LENGTHS), 3, past_key_values=hf.PagedCache(eager.config))


def test_encoders_with_decoders_are_reported() -> None:
    with pytest.raises(RunError, match="bart has layers that attend to an encoder"):
        hf.PagedCache(transformers.BartConfig())
