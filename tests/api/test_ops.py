"""The operators in torch: opcheck, torch.compile of a decode step, dispatch modes, and an import without effects."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flashpage
from flashpage.wrappers import operators

PAGES, PAGE, HEADS, KV_HEADS, DIM = 8, 16, 4, 2, 64


def decode_wrapper(last_page_len: tuple[int, ...] = (3, 16, 7)) -> flashpage.BatchDecodeWithPagedKVCacheWrapper:
    wrapper = flashpage.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8))
    plan_decode(wrapper, last_page_len)
    return wrapper


def plan_decode(
    wrapper: flashpage.BatchDecodeWithPagedKVCacheWrapper,
    last_page_len: tuple[int, ...],
    q_dtype: torch.dtype = torch.float32,
) -> None:
    indptr = torch.tensor([0, 2, 3, 6], dtype=torch.int32)
    indices = torch.tensor([5, 2, 7, 0, 1, 3], dtype=torch.int32)
    last = torch.tensor(last_page_len, dtype=torch.int32)
    wrapper.plan(indptr, indices, last, HEADS, KV_HEADS, DIM, PAGE, q_data_type=q_dtype)


def ragged_wrapper() -> flashpage.BatchPrefillWithRaggedKVCacheWrapper:
    wrapper = flashpage.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8))
    indptr = torch.tensor([0, 5, 12], dtype=torch.int32)
    wrapper.plan(indptr, indptr, HEADS, KV_HEADS, DIM, causal=True, q_data_type=torch.float32)
    return wrapper


@pytest.fixture
def q() -> torch.Tensor:
    return torch.randn(3, HEADS, DIM)


@pytest.fixture
def cache() -> torch.Tensor:
    return torch.randn(PAGES, 2, PAGE, KV_HEADS, DIM)


def run_arguments(wrapper: object, q: torch.Tensor, parts: list[torch.Tensor]) -> tuple[object, ...]:
    values = wrapper._values(None)  # type: ignore[attr-defined]
    lse = torch.empty(q.shape[:2])
    nothing = (None,) * 8
    return (wrapper._attention.handle, q, parts, torch.empty_like(q), lse, *values, *nothing)  # type: ignore[attr-defined]


def test_opcheck_run(q: torch.Tensor, cache: torch.Tensor) -> None:
    wrapper = decode_wrapper()
    torch.library.opcheck(torch.ops.flashpage.run_paged.default, run_arguments(wrapper, q, [cache]))
    pair = [cache[:, 0], cache[:, 1]]
    torch.library.opcheck(torch.ops.flashpage.run_paged.default, run_arguments(wrapper, q, pair))
    ragged, rows = ragged_wrapper(), torch.randn(12, HEADS, DIM)
    kv = [torch.randn(12, KV_HEADS, DIM) for _ in range(2)]
    torch.library.opcheck(torch.ops.flashpage.run_ragged.default, run_arguments(ragged, rows, kv))


def test_opcheck_merge() -> None:
    v, s = torch.randn(5, 3, HEADS, DIM), torch.randn(5, 3, HEADS)
    pair = (v[:, 0], s[:, 0], v[:, 1], s[:, 1])
    torch.library.opcheck(torch.ops.flashpage.merge_states.default, (v, s))
    torch.library.opcheck(torch.ops.flashpage.merge_state.default, pair)
    mask = torch.tensor([True, False, True, True, False])
    written = (v[:, 0].contiguous(), s[:, 0].contiguous(), *pair[2:])
    for given in (mask, None):
        torch.library.opcheck(torch.ops.flashpage.merge_state_in_place.default, (*written, given))


def test_opcheck_append(cache: torch.Tensor) -> None:
    new = torch.randn(4, KV_HEADS, DIM)
    numbers = [torch.tensor(n, dtype=torch.int32) for n in ([0, 0, 1, 1], [0, 17, 1, 2], [5, 2, 7], [0, 2, 3])]
    torch.library.opcheck(torch.ops.flashpage.append_paged_kv_cache.default, (new, new, *numbers, [cache], "NHD"))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.rare)])
def test_decode_step_compiles_whole(q: torch.Tensor, cache: torch.Tensor, backend: str) -> None:
    wrapper = decode_wrapper()
    torch._dynamo.reset()

    def step(x: torch.Tensor) -> torch.Tensor:
        return wrapper.run(x * 2, cache) + 1

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(q), step(q))
    # The operator carries the wrapper and not the plan: a new plan gives new results without a recompile.
    plan_decode(wrapper, (1, 2, 3))
    with torch.compiler.set_stance("fail_on_recompile"):
        found = compiled(q)
    torch.testing.assert_close(found, step(q))


def test_compiled_run_takes_all_arguments(q: torch.Tensor, cache: torch.Tensor) -> None:
    wrapper = decode_wrapper()
    torch._dynamo.reset()
    sinks, k_scale = torch.randn(HEADS), torch.tensor([0.5, 2.0])
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2])

    def step(out: torch.Tensor, lse: torch.Tensor) -> None:
        pair = (cache[:, 0], cache[:, 1])
        wrapper.run(q, pair, out=out, lse=lse, q_scale=0.5, k_scale=k_scale, sinks=sinks, window_left=9)

    torch.compile(step, fullgraph=True, backend="aot_eager")(out, lse)
    expected, expected_lse = torch.empty_like(out), torch.empty_like(lse)
    step(expected, expected_lse)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)


def test_a_compiled_run_of_fp8_queries_knows_its_outputs_type(q: torch.Tensor, cache: torch.Tensor) -> None:
    torch._dynamo.reset()
    wrapper, fp8 = decode_wrapper(), torch.float8_e4m3fn
    plan_decode(wrapper, (5, 16, 3), fp8)
    q, cache = q.to(fp8), cache.to(fp8)

    def step(x: torch.Tensor) -> torch.Tensor:
        return wrapper.run(x, cache) * 2

    found = torch.compile(step, fullgraph=True, backend="aot_eager")(q)
    assert found.dtype == torch.bfloat16 and torch.equal(found, step(q))


@pytest.mark.parametrize("which", ["q", "cache"])
def test_compiled_runs_refuse_tensors_that_require_grad(q: torch.Tensor, cache: torch.Tensor, which: str) -> None:
    """As eager ones do; compiled code itself passes tensors that require none."""
    torch._dynamo.reset()
    wrapper = decode_wrapper()
    compiled = torch.compile(lambda: wrapper.run(q, cache) * 2, backend="aot_eager")
    given = {"q": q, "cache": cache}[which].requires_grad_()
    with pytest.raises(flashpage.RunError, match="requires grad, but the output has no gradient"):
        compiled()
    with torch.no_grad():
        assert not compiled().requires_grad
    given.requires_grad_(False)
    sinks = torch.zeros(HEADS, requires_grad=True)
    with pytest.raises(flashpage.RunError, match="^sinks requires grad"):
        torch.compile(lambda: wrapper.run(q, cache, sinks=sinks), backend="aot_eager")()
    scale, out = torch.ones(1, requires_grad=True), torch.zeros_like(q, requires_grad=True)
    for name, own in (("k_scale", {"k_scale": scale}), ("out", {"out": out * 1})):
        with pytest.raises(flashpage.RunError, match=f"^{name} requires grad"):
            torch.compile(lambda own=own: wrapper.run(q, cache, **own), backend="aot_eager")()
    v = torch.randn(5, HEADS, DIM, requires_grad=True)
    with pytest.raises(flashpage.RunError, match="^v_a requires grad"):
        torch.compile(flashpage.merge_state, backend="aot_eager")(v, q.new_zeros(5, HEADS), v, q.new_zeros(5, HEADS))


def test_compiled_code_may_make_a_wrapper_and_plan(q: torch.Tensor, cache: torch.Tensor) -> None:
    """Nothing was planned before, so that this makes what the wrapper frees when it is gone."""
    torch._dynamo.reset()

    def step(x: torch.Tensor) -> torch.Tensor:
        return decode_wrapper().run(x * 2, cache) + 1

    found = torch.compile(step, backend="aot_eager")(q)
    assert torch.equal(found, step(q))


def test_compiled_functions() -> None:
    v, s = torch.randn(5, 3, HEADS, DIM), torch.randn(5, 3, HEADS)
    torch._dynamo.reset()

    def merge(v: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        first = flashpage.merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1])
        out, lse = flashpage.merge_states(v, s)
        return out + first[0] + lse.unsqueeze(-1)

    compiled = torch.compile(merge, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(v, s), merge(v, s))


def test_compiled_append_writes_the_cache(cache: torch.Tensor) -> None:
    torch._dynamo.reset()
    new = torch.randn(1, KV_HEADS, DIM)
    numbers = [torch.tensor(n, dtype=torch.int32) for n in ([0], [17], [5, 2], [0, 2], [2])]

    def append(new: torch.Tensor) -> None:
        flashpage.append_paged_kv_cache(new, new + 1, *numbers[:2], cache, *numbers[2:])

    torch.compile(append, fullgraph=True, backend="aot_eager")(new)
    torch.testing.assert_close(cache[2, 0, 1], new[0])
    torch.testing.assert_close(cache[2, 1, 1], new[0] + 1)


def test_a_dispatch_mode_sees_the_operator(q: torch.Tensor, cache: torch.Tensor) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    wrapper = decode_wrapper()
    expected = wrapper.run(q, cache)
    with Watch():
        found = wrapper.run(q, cache)
    torch.testing.assert_close(found, expected)
    assert "flashpage.run_paged.default" in seen


@pytest.mark.parametrize("is_graph", [False, True], ids=["eager", "for graphs"])
def test_inductor_captures_runs_of_wrappers_for_graphs_alone(
    is_graph: bool, q: torch.Tensor, cache: torch.Tensor
) -> None:
    """Another wrapper's captured run would have the plan of the day on which it was captured."""
    from torch._inductor.utils import is_cudagraph_unsafe_fx_node

    given = {"use_cuda_graph": True, "max_batch": 3, "max_pages": 6} if is_graph else {}
    wrapper = flashpage.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8), **given)
    plan_decode(wrapper, (3, 16, 7))
    found = []

    def backend(module: torch.fx.GraphModule, _: object) -> object:
        found.extend(node for node in module.graph.nodes if "flashpage" in str(node.target))
        return module.forward

    torch._dynamo.reset()
    out = torch.compile(lambda x: wrapper.run(x, cache), fullgraph=True, backend=backend)(q)
    torch.testing.assert_close(out, wrapper.run(q, cache))
    assert [str(node.target).split(".")[1] for node in found] == ["run_paged_captured" if is_graph else "run_paged"]
    operator = getattr(torch.ops.flashpage, str(found[0].target).split(".")[1]).default
    found[0].target = operator  # dynamo leaves the packet there
    assert is_cudagraph_unsafe_fx_node(found[0]) is not is_graph


def test_a_lost_wrapper_is_reported(q: torch.Tensor, cache: torch.Tensor) -> None:
    wrapper = decode_wrapper()
    arguments = run_arguments(wrapper, q, [cache])
    del wrapper
    with pytest.raises(flashpage.RunError, match="no longer exists"):
        torch.ops.flashpage.run_paged(*arguments)


def test_every_function_is_an_operator() -> None:
    for name in operators._IMPLEMENTATIONS:
        assert hasattr(torch.ops.flashpage, name)


def test_import_does_nothing(tmp_path: Path) -> None:
    """Importing flashpage imports no torch and makes no folder, no log handler and no CUDA context."""
    program = (
        "import logging, os, sys\n"
        "import flashpage\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
        "assert not logging.getLogger().handlers and not logging.getLogger('flashpage').handlers\n"
        "assert os.listdir(os.environ['HOME']) == []\n"
        "import flashpage.decode, flashpage.prefill, flashpage.cascade, flashpage.page, torch\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert os.listdir(os.environ['HOME']) == []\n"
        "assert set(flashpage.__all__) <= set(dir(flashpage))\n"
        "for name in flashpage.__all__: getattr(flashpage, name)\n"
    )
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=120)
