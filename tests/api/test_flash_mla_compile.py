"""flash_mla_with_kvcache under torch.compile and dispatch modes: one operator, which plans when it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from flashpage import RunError
from flashpage.flash_mla import (
    FlashMLASchedMeta,
    flash_mla_with_kvcache,
    get_mla_decoding_metadata,
    get_mla_metadata,
)
from flashpage.wrappers.base import Attention

pytestmark = pytest.mark.usefixtures("quick_kernels")

HEADS, CKV, KPE, PAGE, TOPK = 4, 64, 32, 8, 6


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    torch._dynamo.reset()


class Graphs:
    """A backend of torch.compile that compiles nothing and keeps the graphs."""

    def __init__(self) -> None:
        self.found: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.found.append(graph)
        return graph.forward

    def operators(self) -> list[str]:
        """Names of flashpage's operators in all graphs."""
        targets = [str(node.target) for graph in self.found for node in graph.graph.nodes if node.op == "call_function"]
        return [target for target in targets if target.startswith("flashpage.")]


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The plans that were made from here on."""
    found: list[str] = []
    for name in ("plan", "plan_on_device"):
        original = getattr(Attention, name)

        def plan(self: Attention, *args: Any, original: Any = original, name: str = name) -> None:
            found.append(name)
            original(self, *args)

        monkeypatch.setattr(Attention, name, plan)
    return found


def dense(**changes: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(7)
    given = {
        "q": torch.randn(2, 1, HEADS, CKV + KPE, generator=generator),
        "k_cache": torch.randn(6, PAGE, 1, CKV + KPE, generator=generator),
        "block_table": torch.tensor([[4, 1, 0], [2, 5, 3]], dtype=torch.int32),
        "cache_seqlens": torch.tensor([20, 9], dtype=torch.int32),
        "head_dim_v": CKV,
        "tile_scheduler_metadata": get_mla_metadata()[0],
        "softmax_scale": 0.2,
        "causal": True,
    }
    return given | changes


def sparse(**changes: Any) -> dict[str, Any]:
    lists = (torch.arange(2 * TOPK).int().reshape(2, 1, TOPK) * 7) % (6 * PAGE)
    lens = torch.tensor([TOPK, 2], dtype=torch.int32)
    of_lists = {"block_table": None, "cache_seqlens": None, "causal": False, "indices": lists, "topk_length": lens}
    return dense() | of_lists | {"attn_sink": torch.linspace(-1, 1, HEADS)} | changes


def two_caches() -> dict[str, Any]:
    """Rows of 584 bytes, which one launch reads from both caches."""
    sizes = {"q": torch.randn(2, 1, HEADS, 512), "head_dim_v": 512}
    caches = {
        "k_cache": torch.zeros(6, PAGE, 1, 584, dtype=torch.uint8),
        "extra_k_cache": torch.zeros(3, 2, 1, 584, dtype=torch.uint8),
        "extra_indices_in_kvcache": torch.tensor([[[5, 0, -1]], [[1, 2, 3]]], dtype=torch.int32),
        "extra_topk_length": torch.tensor([3, 1], dtype=torch.int32),
        "kv_format": "V4",
    }
    return sparse(**sizes, **caches)


def in_e4m3(descale: Any) -> dict[str, Any]:
    """A cache and queries with one scale each."""
    given = dense()
    narrow = {name: given[name].to(torch.float8_e4m3fn) for name in ("q", "k_cache")}
    return given | narrow | {"descale_q": torch.tensor([0.25]), "descale_k": descale, "is_fp8_kvcache": True}


def again(given: dict[str, Any]) -> dict[str, Any]:
    """Equal arguments with the metadata of another step."""
    return given | {"tile_scheduler_metadata": get_mla_metadata()[0]}


def layer(given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = flash_mla_with_kvcache(**given)
    return out * 2, lse + 1


def check(found: tuple[torch.Tensor, torch.Tensor], given: dict[str, Any]) -> None:
    for one, other in zip(found, layer(again(given)), strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


CALLS = {
    "dense": dense,
    "sparse": sparse,
    "two-caches": two_caches,
    "e4m3": lambda: in_e4m3(torch.tensor([0.5])),
    "e4m3-number": lambda: in_e4m3(0.5),
    "uncut": lambda: dense(enable_batch_invariant=True, use_legacy=True),
}


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.rare)])
@pytest.mark.parametrize("name", CALLS)
def test_a_first_call_compiles_whole(name: str, backend: str) -> None:
    """Nothing has planned before."""
    given = CALLS[name]()
    check(torch.compile(layer, fullgraph=True, backend=backend)(given), given)


def test_a_graph_has_one_operator_a_call() -> None:
    given, graphs = dense(), Graphs()
    check(torch.compile(layer, backend=graphs)(given), given)
    assert len(graphs.found) == 1 and graphs.operators() == ["flashpage.flash_mla_with_kvcache"]


def test_later_steps_compile_nothing_and_are_planned(plans: list[str]) -> None:
    """Each step has other lengths and metadata of its own; its two layers share a plan."""

    def step(given: dict[str, Any]) -> torch.Tensor:
        return flash_mla_with_kvcache(**given)[0] + flash_mla_with_kvcache(**given | {"q": given["q"] * 2})[0]

    graphs = Graphs()
    compiled = torch.compile(step, fullgraph=True, backend=graphs)
    for lens in ([20, 9], [3, 16], [24, 1], [0, 0]):
        given = dense(cache_seqlens=torch.tensor(lens, dtype=torch.int32))
        expected = step(again(given))
        del plans[:]
        assert torch.equal(compiled(given), expected) and len(plans) == 1
        assert torch.equal(compiled(given), step(given)) and len(plans) == 1  # eager calls share it, too
    assert len(graphs.found) == 1


def test_batches_of_any_size_share_compiled_code() -> None:
    graphs = Graphs()
    compiled = torch.compile(layer, fullgraph=True, backend=graphs, dynamic=True)
    for batch in (2, 3, 5):
        lens = torch.arange(batch).int() + 3
        tables = torch.arange(batch).int().unsqueeze(1) % 6
        given = dense(q=torch.randn(batch, 1, HEADS, CKV + KPE), cache_seqlens=lens, block_table=tables)
        check(compiled(given), given)
    assert len(graphs.found) == 1


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.rare)])
def test_metadata_may_be_made_by_compiled_code(backend: str, plans: list[str]) -> None:
    """Each run of the code is a step, and so is each call of get_mla_metadata in it."""

    def step(given: dict[str, Any]) -> tuple[torch.Tensor, FlashMLASchedMeta]:
        first, other = get_mla_metadata()[0], get_mla_metadata()[0]
        out = flash_mla_with_kvcache(**given | {"tile_scheduler_metadata": first})[0]
        out = out + flash_mla_with_kvcache(**given | {"tile_scheduler_metadata": first})[0]
        return out + flash_mla_with_kvcache(**given | {"tile_scheduler_metadata": other})[0], first

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    given = dense()
    for _ in range(2):
        expected = step(given)[0]
        del plans[:]
        found, meta = compiled(given)
        assert torch.equal(found, expected) and len(plans) == 2
        given["cache_seqlens"] += 1
    given["cache_seqlens"] -= 1
    check(layer(given | {"tile_scheduler_metadata": meta}), given)  # which a later call may pass, too


def test_metadata_that_is_kept(plans: list[str]) -> None:
    """get_mla_decoding_metadata says when a step begins, and is called outside of compiled code."""
    given, graphs = dense(), Graphs()
    meta = given["tile_scheduler_metadata"]
    compiled = torch.compile(layer, fullgraph=True, backend=graphs)
    for _ in range(2):
        meta.tile_scheduler_metadata, meta.num_splits = get_mla_decoding_metadata(given["cache_seqlens"], HEADS, 1)
        expected = layer(again(given))
        del plans[:]
        for _ in range(2):
            assert torch.equal(compiled(given)[0], expected[0])
        assert len(plans) == 1
    assert len(graphs.found) == 1

    def with_step(given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        meta.tile_scheduler_metadata, meta.num_splits = get_mla_decoding_metadata(given["cache_seqlens"], HEADS, 1)
        return layer(given)

    compiled = torch.compile(with_step, backend="aot_eager")
    check(compiled(given), given)
    check(compiled(given), given)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="call it outside of torch.compile, and assign its result"):
        torch.compile(with_step, fullgraph=True, backend="aot_eager")(given)


def test_scales_that_are_numbers_may_change() -> None:
    """Dynamo traces a number that changes as a symbol, and does not break the graph."""
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for descale in (1.0, 2.0, 3.0):
        given = in_e4m3(torch.tensor([descale]))
        expected = layer(again(given))
        found = compiled(again(given) | {"descale_k": descale})
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"cache_seqlens": torch.zeros(3).int()}, "q is for 2 requests but cache_seqlens has 3"),
        ({"attn_sink": torch.zeros(HEADS)}, "attn_sink=.* is not supported: it belongs to sparse attention"),
        ({"head_dim_v": 0}, "head_dim_v=0"),
        ({"softmax_scale": float("nan")}, "softmax_scale=nan"),
        ({"q": dense()["q"].requires_grad_()}, "q requires grad, but the output has no gradient"),
        ({"k_cache": dense()["k_cache"].requires_grad_()}, "k_cache requires grad"),
        (in_e4m3(-1.0), "descale_k=-1.0 cannot be used"),
        (in_e4m3(torch.ones(1, requires_grad=True)), "descale_k requires grad"),
        ({"num_splits": torch.zeros(3).int()}, "num_splits is .*: leave it None"),
        ({"tile_scheduler_metadata": None}, "tile_scheduler_metadata=None: pass the first result of get_mla_metadata"),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else "",
)
def test_refused(change: dict[str, Any], says: str) -> None:
    """With the errors of calls that are not compiled."""
    with pytest.raises((RunError, NotImplementedError), match=f"^{says}"):
        torch.compile(layer, backend="aot_eager")(dense(**change))


def test_opcheck() -> None:
    operator = torch.ops.flashpage.flash_mla_with_kvcache.default
    for given in (dense(), sparse()):  # torch cannot compare e4m3
        given["metadata"] = given["tile_scheduler_metadata"].handle
        values = {"causal": False, "enable_batch_invariant": False, "use_legacy": False} | given
        arguments = [values.get(argument.name) for argument in operator._schema.arguments]
        torch.library.opcheck(operator, tuple(arguments))


def test_a_dispatch_mode_sees_the_operator() -> None:
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    given = two_caches()
    with Mode():
        found = layer(given)
    check(found, given)
    assert seen.count("flashpage.flash_mla_with_kvcache.default") == 1


def test_fake_tensors() -> None:
    """The metadata was made before, outside of their mode."""
    given = dense()
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for name, v in given.items()}
        found = flash_mla_with_kvcache(**fake)
    assert [(tensor.shape, tensor.dtype) for tensor in found] == [(t.shape, t.dtype) for t in layer(given)]
