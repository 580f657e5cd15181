"""Greedy tokens of tiny transformers models equal those of eager attention, in fp32, with every cache."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import hf_copy
import transformers
from hf_models import MODELS, batch_options, greedy, left_padded, make_model, prompts_of
from torch.nn.functional import scaled_dot_product_attention
from transformers.generation.continuous_batching import initialization

from flashpage import hf
from flashpage.engines.transformers import batching, decode
from flashpage.engines.transformers.call import Call, Layer
from flashpage.wrappers.base import Attention

pytestmark = pytest.mark.usefixtures("quick_kernels")

NEW_TOKENS = 24
LENGTHS = [13, 5, 21, 8]
BATCHED = [name for name in MODELS if name != "deepseek-v3"]  # transformers' own pages hold no latents


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


def test_each_group_of_layers_has_slots_of_its_own() -> None:
    """Models of transformers 5.17 may have several groups with full attention, whose lengths are equal."""
    torch.manual_seed(0)
    lens, heads, dim = (5, 7), 2, 16
    ends = torch.tensor([0, *lens]).cumsum(0).int()
    slots = torch.randperm(40).split(20)
    caches = {name: [torch.zeros(40, heads, dim)] for name in ("key_cache", "value_cache")}
    cache = SimpleNamespace(layer_index_to_group_indices=[(0, 0), (1, 0)], sliding_windows=[1, 1], **caches)
    lists = [slots[group][: sum(lens)] for group in (0, 1)]
    kwargs = {"cache": cache, "cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "read_index": lists, "write_index": lists}
    layer = Layer(Call(heads, heads, dim, dim, torch.float32, None, None, True, False), -1, None, None)
    for index in (0, 1):
        q, k, v = torch.randn(3, 1, heads, sum(lens), dim)
        found = batching.attend(layer, index, q, k, v, kwargs)[0]
        parts = zip(*(each[0].split(lens, dim=1) for each in (q, k, v)), strict=True)
        expected = [scaled_dot_product_attention(*part, is_causal=True).transpose(0, 1) for part in parts]
        torch.testing.assert_close(found, torch.cat(expected))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("page_size", [4, 16])
def test_paged_cache(name: str, page_size: int, expected: Any) -> None:
    model, tokens = expected[name]
    cache = hf.PagedCache(model.config, page_size=page_size)
    assert torch.equal(greedy(model, left_padded(LENGTHS), NEW_TOKENS, past_key_values=cache), tokens)
    # Padding is not stored, and neither is the last new token, which no row attends to.
    assert cache.table.lengths.tolist() == [length + NEW_TOKENS - 1 for length in LENGTHS]


@pytest.mark.parametrize("name", BATCHED)
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
    plans: list[str] = []
    forwards = []
    for way in ("plan", "plan_on_device"):
        plan = getattr(Attention, way)
        monkeypatch.setattr(
            Attention, way, lambda *args, plan=plan, way=way, **given: (plans.append(way), plan(*args, **given))[1]
        )
    hook = model.model.register_forward_pre_hook(lambda module, args: forwards.append(module))
    model.generate_batch(
        prompts_of(left_padded(LENGTHS)), **batch_options(8, page_size=8, num_blocks=32, max_batch_tokens=16)
    )
    hook.remove()
    assert len(forwards) > 8
    assert len(plans) == kinds * len(forwards)
    has_tables = name == "llama" and hasattr(initialization, "ATTN_TYPE_TO_ALLOCATOR")
    assert ("plan_on_device" in plans) == has_tables, "a window's slots have no block tables"


@pytest.mark.parametrize("name", ["llama", "gpt-oss", "qwen3"])
@pytest.mark.parametrize("blocks", [0, 32])
@pytest.mark.parametrize("is_padded", [False, True])
def test_decode_steps(name: str, blocks: int, is_padded: bool, expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without block tables, and with three requests padded to four as for CUDA graphs."""
    model, tokens = expected[name]
    if is_padded:
        ModelRunner = pytest.importorskip("transformers.generation.continuous_batching.model_runner").ModelRunner
        made = ModelRunner.__init__
        monkeypatch.setattr(
            ModelRunner,
            "__init__",
            lambda self, *args, **given: (made(self, *args, **given), setattr(self, "pad_inputs", True))[0],
        )
    steps = []
    attend = decode.attend
    monkeypatch.setattr(decode, "attend", lambda *given: (steps.append(given[2].shape[2]), attend(*given))[1])
    outputs = model.generate_batch(
        prompts_of(left_padded(LENGTHS))[:3],
        **batch_options(
            NEW_TOKENS,
            page_size=8,
            num_blocks=32,
            max_batch_tokens=16,
            max_blocks_per_request=blocks,
            max_requests_per_batch=4,
        ),
    )
    assert [output.generated_tokens for output in outputs.values()] == tokens[:3].tolist()
    has_tables = blocks > 0 and name != "gpt-oss" and hasattr(initialization, "ATTN_TYPE_TO_ALLOCATOR")
    assert bool(steps) == has_tables
    assert not has_tables or max(steps) == (4 if is_padded else 3)


@pytest.mark.filterwarnings("ignore:The `paged.` prefix is no longer needed")
def test_prefixed_name(expected: Any) -> None:
    """`paged|fpage` is kept by versions that know prefixes; later ones take the prefix away."""
    model, tokens = expected["llama"]
    model.set_attn_implementation(f"paged|{hf.NAME}")
    outputs = model.generate_batch(
        prompts_of(left_padded(LENGTHS)), **batch_options(NEW_TOKENS, page_size=8, num_blocks=32, max_batch_tokens=16)
    )
    found = model.config._attn_implementation
    model.set_attn_implementation(hf.NAME)
    assert [output.generated_tokens for output in outputs.values()] == tokens.tolist()
    assert found in (hf.NAME, f"paged|{hf.NAME}")


@pytest.mark.parametrize("other", ["sdpa", "eager"])
def test_tokens_of_transformers_own_batches(other: str, expected: Any) -> None:
    """transformers' own attention over its pages gives the tokens that ours gives."""
    model, tokens = expected["llama"]
    model.set_attn_implementation(other)
    options = batch_options(NEW_TOKENS, page_size=8, num_blocks=32, max_batch_tokens=16)
    outputs = model.generate_batch(prompts_of(left_padded(LENGTHS)), **options)
    model.set_attn_implementation(hf.NAME)
    assert [output.generated_tokens for output in outputs.values()] == tokens.tolist()


def test_registering_twice_wraps_once() -> None:
    before = initialization.ensure_decode_fast_path_is_available
    hf.register()
    assert initialization.ensure_decode_fast_path_is_available is before


@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
def test_block_tables_are_kept_for_ours_alone(kind: str) -> None:
    """Names of others go through transformers' own check."""
    if not hasattr(initialization, "ATTN_TYPE_TO_ALLOCATOR"):
        pytest.skip("this version gives block tables to FlashAttention alone")
    config = transformers.LlamaConfig(num_hidden_layers=1, layer_types=[kind], sliding_window=8)
    for name, blocks in ((hf.BATCHING_NAME, 32 if kind == "full_attention" else 0), ("eager", 0)):
        config._attn_implementation = name
        given = transformers.generation.ContinuousBatchingConfig(max_blocks_per_request=32)
        initialization.ensure_decode_fast_path_is_available(config, given, False)
        assert given.max_blocks_per_request == blocks


def test_a_trained_model_in_bfloat16() -> None:
    """Its tokens are certain enough that rounding does not change them, but a wrong page does."""
    model = hf_copy.trained("cpu", length=80, batch=16, vocab_size=64).bfloat16().eval()
    model.set_attn_implementation(hf.NAME)
    hf_copy.check_copies(model, new_tokens=64)
    hf_copy.check_copies(hf_copy.windowed(model, 24), new_tokens=64)


def test_versions_outside_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registering warns for them; not for the version that runs these tests."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hf.register()
    monkeypatch.setattr(transformers, "__version__", "5.20.1")
    with pytest.warns(RuntimeWarning, match=r"transformers 5\.20\.1 is not among .*5\.17, 5\.23, 5\.24"):
        hf.register()
