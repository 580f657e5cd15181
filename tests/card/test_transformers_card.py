"""transformers models on a card, in 16 bits: as close to eager attention as torch's kernels; one model exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import hf_copy
from hf_graphs import HAS_TABLES, planned_by_the_host
from hf_models import MODELS, batch_options, left_padded, make_model
from transformers import DynamicCache

from flashpage import hf
from flashpage.engines.transformers import decode, prompts
from flashpage.wrappers.base import Attention

pytestmark = pytest.mark.cuda
DEVICE = "cuda:0"
NEW_TOKENS = 256
SIZES: dict[str, Any] = {"head_dim": 64, "hidden_size": 256, "initializer_range": 0.05}
OWN: dict[str, dict[str, Any]] = {
    "gemma2": {"attn_logit_softcapping": 0.5},  # its scores are small
    # All experts for every token: a selection would depend on rounding.
    "gpt-oss": {"num_experts_per_tok": 4},
    "deepseek-v3": {"num_experts_per_tok": 4, "topk_group": 2, "head_dim": None, "kv_lora_rank": 128},
}
WITHOUT_SDPA = ("gemma2", "gpt-oss")  # soft cap, sinks


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    hf.register()


@pytest.fixture(scope="module")
def llama() -> Any:
    """A model that is trained in less than a minute to repeat its input."""
    model = hf_copy.trained(DEVICE, length=hf_copy.PERIOD * 2 + NEW_TOKENS, batch=32, head_dim=64)
    model = model.bfloat16().eval()
    model.set_attn_implementation(hf.NAME)
    return model


@pytest.fixture(params=["all", "window"])
def trained(request: pytest.FixtureRequest, llama: Any) -> Any:
    """The trained model, with and without a window."""
    return llama if request.param == "all" else hf_copy.windowed(llama, 24)


def test_a_trained_model_paged(trained: Any) -> None:
    hf_copy.check_copies(trained, NEW_TOKENS)


def test_a_trained_model_with_transformers_cache(trained: Any) -> None:
    assert torch.equal(*hf_copy.copied(trained, NEW_TOKENS))


def test_a_trained_model_in_continuous_batches(trained: Any) -> None:
    """Three requests, at most two at a time; prefills of at most 24 tokens."""
    prompts, goes_on = hf_copy.task(trained, NEW_TOKENS)
    outputs = trained.generate_batch(
        prompts.tolist(), **batch_options(NEW_TOKENS, page_size=16, num_blocks=40, max_batch_tokens=24)
    )
    assert [output.generated_tokens for output in outputs.values()] == goes_on.tolist()


@pytest.mark.skipif(not HAS_TABLES, reason="this version gives block tables to FlashAttention alone")
@pytest.mark.parametrize("is_async", [False, True])
def test_decode_steps_in_graphs(llama: Any, is_async: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode steps are captured with their plans, one graph for each power of two requests; replays plan again."""
    steps = []
    attend = decode.attend

    def seen(*given: Any) -> torch.Tensor:
        steps.append(torch.cuda.is_current_stream_capturing())
        return attend(*given)

    monkeypatch.setattr(decode, "attend", seen)
    prompts, goes_on = hf_copy.task(llama, NEW_TOKENS)
    options = {"page_size": 16, "num_blocks": 80, "max_batch_tokens": 64, "max_blocks_per_request": 32}
    graphs = {"use_cuda_graph": (False, True), "use_async_batching": is_async}
    outputs = llama.generate_batch(prompts.tolist(), **batch_options(NEW_TOKENS, **options, **graphs))
    assert [output.generated_tokens for output in outputs.values()] == goes_on.tolist()
    layers = llama.config.num_hidden_layers
    assert any(steps) and len(steps) < layers * NEW_TOKENS, "replays do not call the attention function"


@pytest.mark.parametrize("is_async", [False, True])
def test_steps_with_prompts_in_graphs(trained: Any, is_async: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All steps are captured, those with prompts by their padded sizes, and the host plans none. Layers with a window
    have no other steps."""
    steps = []
    attend = prompts.attend

    def seen(*given: Any) -> torch.Tensor:
        steps.append(torch.cuda.is_current_stream_capturing())
        return attend(*given)

    monkeypatch.setattr(prompts, "attend", seen)
    monkeypatch.setattr(Attention, "plan", planned_by_the_host)
    ids, goes_on = hf_copy.task(trained, NEW_TOKENS)
    sizes = {"page_size": 16, "num_blocks": 80, "max_batch_tokens": 24, "max_blocks_per_request": 32}
    padding = {"q_padding_interval_size": 8, "kv_padding_interval_size": 256}
    graphs = {"use_cuda_graph": (True, True), "use_async_batching": is_async}
    outputs = trained.generate_batch(ids.tolist(), **batch_options(NEW_TOKENS, **sizes, **padding, **graphs))
    assert [output.generated_tokens for output in outputs.values()] == goes_on.tolist()
    layers = trained.config.num_hidden_layers
    assert any(steps) and len(steps) < layers * NEW_TOKENS, "replays do not call the attention function"


@pytest.mark.parametrize("is_paged", [True, False])
@pytest.mark.parametrize(("name", "dtype"), [*((name, torch.bfloat16) for name in MODELS), ("llama", torch.float16)])
def test_logits(name: str, is_paged: bool, dtype: torch.dtype) -> None:
    """Logits of given tokens, first as a padded batch and then one by one."""
    if is_paged and name == "deepseek-v3" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("kernels of latent rows are Hopper's")
    model = make_model(name, **SIZES | OWN.get(name, {})).to(DEVICE)
    exact = forced_logits(model, "eager", DynamicCache()) if name in WITHOUT_SDPA else None
    model = model.to(dtype)
    eager = forced_logits(model, "eager", DynamicCache())
    other = forced_logits(model, "sdpa", DynamicCache()) if exact is None else exact
    ours = forced_logits(model, hf.NAME, hf.PagedCache(model.config) if is_paged else DynamicCache())
    allowed, found = 2 * distance(other, eager), distance(ours, eager)
    assert 0 < found <= allowed, f"{found:.3e} from eager attention, {allowed:.3e} allowed; logits {eager.norm():.3e}"


def test_a_tree_after_a_prompt() -> None:
    """A 4-D mask over a paged cache."""
    model = make_model("llama", **SIZES).to(DEVICE, torch.bfloat16)
    ids = left_padded([96, 96])["input_ids"].to(DEVICE)
    mask = (torch.rand(1, 1, 6, 96, generator=torch.Generator().manual_seed(2)) < 0.5).to(DEVICE)
    mask[..., :2] = True
    found = []
    for name in ("eager", "sdpa", hf.NAME):
        model.set_attn_implementation(name)
        cache = hf.PagedCache(model.config) if name == hf.NAME else DynamicCache()
        given = torch.where(mask, 0.0, torch.finfo(torch.bfloat16).min).bfloat16() if name == "eager" else mask
        with torch.no_grad():
            model(input_ids=ids[:, :90], past_key_values=cache)
            found.append(model(input_ids=ids[:, 90:], attention_mask=given, past_key_values=cache).logits.float())
    eager, other, ours = found
    assert 0 < distance(ours, eager) <= 2 * distance(other, eager)


@torch.no_grad()
def forced_logits(model: Any, implementation: str, cache: Any) -> torch.Tensor:
    """[tokens, vocabulary], fp32, without padding."""
    model.set_attn_implementation(implementation)
    inputs = {key: value.to(DEVICE) for key, value in left_padded([70, 33, 96]).items()}
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    found = []
    for begin, end in [(0, 80), *((i, i + 1) for i in range(80, 96))]:
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, begin:end]
        found.append(
            model(
                input_ids=ids[:, begin:end], attention_mask=mask[:, :end], position_ids=positions, past_key_values=cache
            ).logits
        )
    return torch.cat(found, dim=1)[mask.bool()].float()


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Root of the mean square."""
    return float((a - b).square().mean().sqrt())
