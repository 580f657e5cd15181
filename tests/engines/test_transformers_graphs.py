"""Graphs of `generate_batch`: which steps are captured, and captured steps on the CPU."""

from __future__ import annotations

import functools
import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from hf_graphs import HAS_TABLES, planned_by_the_host, resolved, use_graphs
from hf_models import MODELS, batch_options, greedy, left_padded, make_model, prompts_of
from transformers.generation.continuous_batching import initialization, model_runner
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

from flashpage import hf
from flashpage.base.errors import RunError
from flashpage.engines.transformers import batching, prompts
from flashpage.engines.transformers.call import Call, Layer
from flashpage.kernels import choose
from flashpage.plan.device_lengths import TableLengths
from flashpage.wrappers import function_plans
from flashpage.wrappers.base import Attention

pytestmark = pytest.mark.usefixtures("quick_kernels")

NEW_TOKENS = 24
LENGTHS = [13, 5, 21, 8]
HAS_NAMES_OF_GRAPHS = hasattr(initialization, "get_accelerator_graph_name")  # others look for a card themselves


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    hf.register()


def test_graphs_that_ended_keep_no_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call has a manager with a thread, and so plans, of its own."""
    model = make_model("llama")
    model.set_attn_implementation(hf.NAME)
    use_graphs(monkeypatch)
    capture, captures = model_runner.ModelRunner._capture_graph, []

    def seen(*args: Any) -> None:
        captures.append(True)
        capture(*args)
        captures.clear()

    monkeypatch.setattr(model_runner.ModelRunner, "_capture_graph", seen)
    monkeypatch.setattr(function_plans, "is_capturing", lambda device: bool(captures))
    sizes = {"page_size": 8, "num_blocks": 12, "max_batch_tokens": 16, "max_requests_per_batch": 4}
    graphs = {"use_cuda_graph": (True, True), "use_async_batching": False}
    kept = []
    for _ in range(5):
        model.generate_batch(prompts_of(left_padded(LENGTHS)), **batch_options(4, **sizes, **graphs))
        gc.collect()
        attentions = {*function_plans._captured, *(attention for _, attention in function_plans._owned)}
        kept.append(len(attentions))
    assert kept[0] > 0 and kept[4] == kept[3] == kept[2]


@pytest.mark.parametrize("name", [name for name in MODELS if name != "deepseek-v3"])
def test_captured_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are those of eager attention, prompts come in pieces of at most 16 tokens, and the host plans nothing."""
    model = make_model(name)
    tokens = greedy(model, left_padded(LENGTHS), NEW_TOKENS)
    model.set_attn_implementation(hf.NAME)
    replays = use_graphs(monkeypatch)
    monkeypatch.setattr(Attention, "plan", planned_by_the_host)
    sizes = {"page_size": 8, "num_blocks": 12, "max_batch_tokens": 16, "max_requests_per_batch": 4}
    padding = {"q_padding_interval_size": 4, "kv_padding_interval_size": 32}
    graphs = {"use_cuda_graph": (True, True), "use_async_batching": False}
    options = batch_options(NEW_TOKENS, **sizes, **padding, **graphs)
    outputs = model.generate_batch(prompts_of(left_padded(LENGTHS)), **options)
    assert [output.generated_tokens for output in outputs.values()] == tokens.tolist()
    assert len(replays) > 3 * len(set(replays)), "a graph serves steps of other lengths"
    has_tables = HAS_TABLES and name in ("llama", "qwen3")  # which have no windows
    assert {graph.is_decode for graph in replays} == ({False, True} if has_tables else {False})
    assert model.config._attn_implementation == hf.NAME


@pytest.mark.parametrize("starts", [(0, 0, 0), (6, 0, 9)])
@pytest.mark.parametrize("window", [-1, 4])
def test_padded_steps_planned_on_the_device(starts: tuple[int, ...], window: int) -> None:
    """Outputs are those of the same step, without padding, that the host plans. Memory of no token is NaN."""
    torch.manual_seed(0)
    rows, heads, kv_heads, dim, slots = (5, 1, 3), 4, 2, 16, 60
    tokens = tuple(start + count for start, count in zip(starts, rows, strict=True))
    lists = torch.randperm(slots - 1)[: sum(tokens)].add(1).split(tokens)
    read = torch.cat(lists)
    write = torch.cat([own[start:] for own, start in zip(lists, starts, strict=True)])
    q = torch.randn(1, heads, sum(rows), dim)
    k, v = torch.randn(2, 1, kv_heads, sum(rows), dim)
    stored = torch.randn(2, slots, kv_heads, dim)
    unused = torch.ones(slots, dtype=torch.bool)
    unused[read] = False
    stored[:, unused] = float("nan")
    layer = Layer(Call(heads, kv_heads, dim, dim, torch.float32, None, None, True, False), window, None, None)
    config = transformers.LlamaConfig(num_hidden_layers=1)

    def attended(more_rows: int, more_requests: int, more_slots: int) -> torch.Tensor:
        caches = {"key_cache": [stored[0].clone()], "value_cache": [stored[1].clone()]}
        cache = SimpleNamespace(layer_index_to_group_indices=[(0, 0)], sliding_windows=[1], config=config, **caches)
        ends = [torch.tensor([0, *own, *[0] * more_requests]).cumsum(0).int() for own in (rows, tokens)]
        padded = [torch.nn.functional.pad(each, (0, 0, 0, more_rows)) for each in (q, k, v)]
        indices = [torch.nn.functional.pad(each, (0, more)) for each, more in ((read, more_slots), (write, more_rows))]
        names = ("read_index", "write_index")
        kwargs = {"cache": cache, "cu_seq_lens_q": ends[0], "cu_seq_lens_k": ends[1]}
        kwargs |= {name: [each] for name, each in zip(names, indices, strict=True)}
        if not any(starts):
            kwargs["read_index"] = [read[:0]]
        return batching.attend(layer, 0, *padded, kwargs)[0]

    expected = attended(0, 0, 0)
    prompts.capture(config, True)
    found = attended(7, 4, 11)
    prompts.capture(config, False)
    torch.testing.assert_close(found[: sum(rows)], expected)
    assert not found[sum(rows) :].any() and len(found) == sum(rows) + 7


@pytest.mark.parametrize("has_slots", [True, False])
def test_tables_are_no_longer_than_requests(has_slots: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 5.17 can give a step such arguments by chance. The copy that a plan of the CPU makes has one row for
    each request, and not one for each slot."""
    copied: list[torch.Tensor] = []

    class Kept(TableLengths):
        def __init__(self, *args: Any, **given: Any) -> None:
            super().__init__(*args, **given)
            copied.append(self.read)

    monkeypatch.setattr(function_plans, "TableLengths", Kept)
    tokens = [1024, 3, 0]
    ends = torch.tensor([0, *tokens]).cumsum(0).int()
    q, k, v = torch.randn(3, 1, 2, sum(tokens), 16)
    stored = torch.stack([k, v])[:, 0].transpose(1, 2).unsqueeze(2)  # pages of one token
    slots = torch.arange(len(k[0, 0])).flip(0) if has_slots else None
    if slots is not None:
        stored = stored[:, slots]
    layer = Layer(Call(2, 2, 16, 16, torch.float32, None, None, True, False), -1, None, None)
    found = prompts.attend(layer, "any", q, (stored[0], stored[1]), (ends, ends), slots, ends.clone())[0]
    parts = [each.split(tokens, dim=2)[:2] for each in (q, k, v)]
    expected = [
        torch.nn.functional.scaled_dot_product_attention(*one, is_causal=True)[0] for one in zip(*parts, strict=True)
    ]
    torch.testing.assert_close(found, torch.cat(expected, 1).transpose(0, 1))
    assert [table.numel() for table in copied] == [len(tokens) * max(tokens)]


@pytest.mark.parametrize("window", [1, 8])
def test_nothing_is_copied_to_the_host(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors without memory have no numbers that the host could read. Layers with a window gather."""

    class Planned:
        def on_device(self, tables: Any, key: Any, owner: Any) -> Planned:
            return self

        def run(self, q: torch.Tensor, pages: Any, out: torch.Tensor, sinks: None) -> None:
            assert (len(pages[0]), len(q)) == (50 if window == 1 else 9, 9)

    monkeypatch.setattr(prompts, "plan_of", lambda *given: Planned())
    config = transformers.LlamaConfig(num_hidden_layers=1)
    empty = functools.partial(torch.empty, device="meta")
    cache = SimpleNamespace(
        config=config,
        layer_index_to_group_indices=[(0, 0)],
        sliding_windows=[window],
        key_cache=[empty(50, 2, 16)],
        value_cache=[empty(50, 2, 16)],
        update=lambda key, value, **given: (key[0].transpose(0, 1), value[0].transpose(0, 1)),
    )
    ends = [empty(5, dtype=torch.int32) for _ in range(2)]
    slots = [empty(size, dtype=torch.int64) for size in (20, 9)]
    kwargs = {"cache": cache, "cu_seq_lens_q": ends[0], "cu_seq_lens_k": ends[1]}
    kwargs |= {"read_index": slots[:1], "write_index": slots[1:]}
    q, k, v = empty(1, 4, 9, 16), *(empty(1, 2, 9, 16) for _ in range(2))
    layer = Layer(Call(4, 2, 16, 16, torch.float32, None, None, True, False), window - 1 or -1, None, None)
    prompts.capture(config, True)
    assert batching.attend(layer, 0, q, k, v, kwargs).shape == (1, 9, 4, 16)


def test_the_kernel_is_a_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph has as many requests as rows, at most; by their average prompts would run in the tiles of decodes."""
    chosen_for = []
    packed_rows = choose.packed_rows
    monkeypatch.setattr(choose, "packed_rows", lambda *given: (chosen_for.append(given[1:]), packed_rows(*given))[1])
    layer = Layer(Call(2, 2, 16, 16, torch.float32, None, None, True, False), -1, None, None)
    ends = torch.tensor([0, 30, 31, *[32] * 30]).int()
    q, k, v = torch.randn(3, 1, 2, 32, 16)
    pages = (k[0].transpose(0, 1).unsqueeze(1), v[0].transpose(0, 1).unsqueeze(1))
    prompts.attend(layer, "any", q, pages, (ends, ends), None, ends.clone())
    assert chosen_for == [(1, 32)]


@pytest.mark.parametrize(
    ("given", "captured"),
    [
        ({}, (False, False)),  # the model is on no card
        ({"q_padding_interval_size": 32}, (True, True)),  # a size of padding means graphs of all steps
        ({"use_cuda_graph": True}, (True, True)),
        ({"use_cuda_graph": (False, True)}, (False, True)),
        ({"use_cuda_graph": (True, True)}, (True, True)),
        ({"use_cuda_graph": (True, False)}, (True, False)),
        ({"use_cuda_graph": False, "q_padding_interval_size": 32}, (False, False)),
        ({"use_cuda_graph": True, "max_blocks_per_request": 0}, (True, False)),
    ],
)
@pytest.mark.parametrize("has_card", [True, False])
def test_captured_steps_are_chosen(
    given: dict[str, Any], captured: tuple[bool, bool], has_card: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a card has graphs, and as where there is none."""
    if not HAS_NAMES_OF_GRAPHS:
        pytest.skip("this version looks for a card itself")
    monkeypatch.setattr(initialization, "get_accelerator_graph_name", lambda: "CUDAGraph" if has_card else None)
    config = transformers.LlamaConfig(num_hidden_layers=1)
    config._attn_implementation = hf.BATCHING_NAME
    found = resolved(config, "cpu", **given)
    captured = captured if has_card else (False, False)
    assert (found.use_cuda_graph, bool(found.use_async_batching)) == (captured, any(captured))
    assert prompts.are_captured({"cache": SimpleNamespace(config=config)}, 1) == captured[0]
    resolved(config, "cpu", use_cuda_graph=False)
    assert not prompts.are_captured({"cache": SimpleNamespace(config=config)}, 1), (
        "a manager that is made later chooses anew"
    )


@pytest.mark.parametrize(
    ("given", "captures_decodes", "is_async"),
    [
        ({}, True, True),
        ({"use_async_batching": False}, True, False),
        ({"use_cuda_graph": False}, False, False),
        ({"decode_compile_config": transformers.CompileConfig()}, False, False),
    ],
)
def test_decodes_are_captured_on_a_card(
    given: dict[str, Any], captures_decodes: bool, is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the model is on a card, when its manager is made. Steps with prompts are captured on demand."""
    if not HAS_NAMES_OF_GRAPHS:
        pytest.skip("this version looks for a card itself")
    monkeypatch.setattr(initialization, "get_accelerator_graph_name", lambda: "CUDAGraph")
    config = transformers.LlamaConfig(num_hidden_layers=1)
    config._attn_implementation = hf.NAME
    model = SimpleNamespace(device=torch.device("cuda"), config=config)
    model.set_attn_implementation = functools.partial(setattr, config, "_attn_implementation")
    ContinuousBatchingManager.switch_to_cb_friendly_attn(SimpleNamespace(), model)
    found = resolved(config, "cuda", **given)
    assert (found.use_cuda_graph, bool(found.use_async_batching)) == ((False, captures_decodes), is_async)
    config._attn_implementation = hf.BATCHING_NAME
    assert resolved(config, "cuda").use_cuda_graph == (False, False)  # a manager that is made later notes its own card


@pytest.mark.parametrize(
    ("longest", "rows", "are_captured"),
    [
        (1024, 16, True),
        ({"full_attention": 2048, "sliding_attention": 5000}, 16, True),  # all slots of the cache
        (1024, 15, False),  # the longest request has fewer new tokens than the step has rows: there is no padding
        (1000, 16, False),
        (512, 16, False),
        ({"full_attention": 2048, "sliding_attention": 100}, 16, False),
    ],
)
def test_arguments_of_captured_steps(longest: Any, rows: int, are_captured: bool) -> None:
    """transformers 5.17 gives captured steps bounds of lengths."""
    kwargs = {"cache": SimpleNamespace(num_pages=5000), "max_seqlen_q": rows, "max_seqlen_k": longest}
    assert prompts.are_captured(kwargs, 16) == are_captured


@pytest.mark.parametrize("captures", [False, True])
def test_steps_that_are_not_captured_are_planned_by_the_host(captures: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All versions, as their arguments or their manager say."""
    model = make_model("llama")
    model.set_attn_implementation(hf.NAME)
    use_graphs(monkeypatch)
    planned = []
    plan = Attention.plan
    monkeypatch.setattr(Attention, "plan", lambda *given, **more: (planned.append(1), plan(*given, **more))[1])
    sizes = {"page_size": 8, "num_blocks": 12, "max_batch_tokens": 16, "max_requests_per_batch": 4}
    graphs = {"use_cuda_graph": (captures, False), "use_async_batching": False}
    outputs = model.generate_batch(prompts_of(left_padded(LENGTHS)), **batch_options(4, **sizes, **graphs))
    assert all(len(output.generated_tokens) == 4 for output in outputs.values())
    assert bool(planned) != captures


def test_a_capture_of_another_manager_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its warm-up was planned by the host, so the capture would have to compile."""
    monkeypatch.setattr(batching, "is_capturing", lambda device: True)
    q = torch.randn(1, 2, 3, 16)
    layer = Layer(Call(2, 2, 16, 16, torch.float32, None, None, True, False), -1, None, None)
    kwargs = {"cache": SimpleNamespace(config=transformers.LlamaConfig(num_hidden_layers=1))}
    with pytest.raises(RunError, match="pass use_cuda_graph=True with the ContinuousBatchingConfig"):
        batching.attend(layer, 0, q, q, q, kwargs)
