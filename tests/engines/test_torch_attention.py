"""flashpage under PyTorch's flash operators: registered for the CPU here, where torch has no such kernels, and
activated on a card."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn import attention
from torch.nn.attention import varlen
from torch.nn.attention.varlen import AuxRequest, varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from torch_operators import under_operators

from flashpage import CapabilityError, torch_attention
from flashpage.engines.pytorch import forward

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 32, 16
ATEN = torch.ops.aten
FLASH = attention.SDPBackend.FLASH_ATTENTION


HAS_PAGES = "block_table" in inspect.signature(varlen_attn).parameters
GROUPED = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}  # 2.11 needs none
reads_pages = pytest.mark.skipif(not HAS_PAGES, reason="this torch's varlen_attn takes no pages")


def data(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def on(device: str, *tensors: torch.Tensor) -> list[torch.Tensor]:
    return [t.to(device, torch.float32 if device == "cpu" else torch.bfloat16) for t in tensors]


@pytest.fixture
def active(device: str) -> Iterator[str]:
    """The device, with flashpage under its operators."""
    with under_operators(device):
        yield device


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of our functions, as they are called."""
    found: list[str] = []
    for name in ("dense", "varlen"):
        function = getattr(forward, name)
        monkeypatch.setattr(
            forward, name, lambda *given, name=name, function=function: (found.append(name), function(*given))[1]
        )
    return found


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor | None = None, scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [rows, heads, dim] and natural LSEs [heads, rows] of one request in fp64."""
    q, k, v = (t.cpu().double() for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[2] ** -0.5 if scale is None else scale)
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1).nan_to_num(0.0), v), scores.logsumexp(-1)


def causal(rows: int, tokens: int, left: int = -1) -> torch.Tensor:
    place = torch.arange(rows)[:, None] + tokens - rows
    seen = torch.arange(tokens) <= place
    return seen if left < 0 else seen & (torch.arange(tokens) >= place - left)


def near(found: torch.Tensor, expected: torch.Tensor) -> None:
    close = 1e-5 if found.is_cpu and found.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.cpu().double(), expected, rtol=close, atol=close)


# ---------------------------------------------------------------- scaled_dot_product_attention

LAYOUTS = {
    "heads before rows": lambda t: t,
    "rows before heads": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "of a fused projection": lambda t: torch.cat([t.transpose(1, 2)] * 2, 2)[:, :, : t.shape[1]].transpose(1, 2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("rows", "tokens"), [(9, 9), (5, 33), (1, 20)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_dense(layout: str, rows: int, tokens: int, is_causal: bool, active: str, kernels: None) -> None:
    arrange = LAYOUTS[layout]
    shapes = ((2, HEADS, rows, DIM), (2, KV_HEADS, tokens, DIM), (2, KV_HEADS, tokens, DIM))
    q, k, v = (arrange(t) for t in on(active, *(data(*shape, seed=i) for i, shape in enumerate(shapes))))
    found = ATEN._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, False, scale=0.3)
    assert len(found) == 9 and found[2] is found[3] is None and found[4:6] == (rows, tokens)
    assert found[0].stride() == torch.empty_like(q).stride(), "torch's shape function says so"
    for i in range(2):
        parts = (t[i].transpose(0, 1) for t in (q, k, v))
        out, lse = reference(*parts, causal(rows, tokens) if is_causal else None, 0.3)
        near(found[0][i].transpose(0, 1), out)
        near(found[1][i], lse)


def test_plans_of_shapes_are_made_once(active: str, kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from flashpage.wrappers.base import Attention

    plans: list[int] = []
    plan = Attention.plan
    monkeypatch.setattr(Attention, "plan", lambda *given: (plans.append(1), plan(*given))[1])
    for count, rows in ((1, 11), (1, 11), (2, 12), (2, 12)):
        q, k = on(active, data(1, HEADS, rows, DIM), data(1, KV_HEADS, 13, DIM))
        ATEN._scaled_dot_product_flash_attention(q, k, k, 0.0, True)
        assert len(plans) == count


# ---------------------------------------------------------------- varlen_attn

ROWS, TOKENS = (3, 17, 1), (20, 17, 33)


def ragged(
    device: str,
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor], torch.Tensor, torch.Tensor]:
    q = on(device, *(data(n, HEADS, DIM, seed=n) for n in ROWS))
    k, v = (on(device, *(data(n, KV_HEADS, DIM, seed=seed + n) for n in TOKENS)) for seed in (1, 2))
    cu = (torch.tensor([0, *n]).cumsum(0).int().to(device) for n in (ROWS, TOKENS))
    return q, k, v, *cu


def pages_of(tokens: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    counts = [-(-len(t) // PAGE) for t in tokens]
    order = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(3))
    cache = tokens[0].new_full((len(order), PAGE, *tokens[0].shape[1:]), float("nan"))
    table = torch.zeros(len(tokens), max(counts) + 1, dtype=torch.int32)
    for i, (mine, count) in enumerate(zip(tokens, counts, strict=True)):
        table[i, :count] = order[sum(counts[:i]) :][:count]
        at = torch.arange(len(mine))
        cache[table[i, at // PAGE].long(), at % PAGE] = mine
    return cache, table.to(cache.device)


@reads_pages
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (6, 0)])
@pytest.mark.parametrize("kind", ["ragged", "used", "paged"])
def test_varlen(kind: str, window: tuple[int, int], active: str, calls: list[str], kernels: None) -> None:
    """Ragged keys, of which `seqused_k` may use fewer, and pages."""
    q, k, v, cu_q, cu_k = ragged(active)
    used = [n - (kind == "used" and n > 17) for n in TOKENS]
    given: dict[str, Any] = {"enable_gqa": True, "window_size": window, "return_aux": AuxRequest(lse=True)}
    if kind != "ragged":
        given["seqused_k"] = torch.tensor(used, dtype=torch.int32, device=active)
    keys = torch.cat(k), torch.cat(v)
    if kind == "paged":
        (k_cache, given["block_table"]), (v_cache, _) = pages_of(k), pages_of(v)
        keys, cu_k = (k_cache, v_cache), None
    out, lse = varlen_attn(torch.cat(q), *keys, cu_q, cu_k, 17, 33, **given)
    to = torch.empty_like(out)
    _, again = varlen.varlen_attn_out(to, torch.cat(q), *keys, cu_q, cu_k, 17, 33, **given)
    assert torch.equal(to, out) and torch.equal(again, lse) and calls == ["varlen"] * 2
    assert torch.equal(
        varlen_attn(torch.cat(q), *keys, cu_q, cu_k, 17, 33, num_splits=1, **given)[1].isinf(), lse.isinf()
    )
    begin = 0
    for own_q, own_k, own_v, count in zip(q, k, v, used, strict=True):
        rows = len(own_q)
        seen = None if window == (-1, -1) else causal(rows, count, window[0])
        expected, expected_lse = reference(own_q, own_k[:count], own_v[:count], seen)
        near(out[begin : begin + rows], expected)
        near(lse[:, begin : begin + rows], expected_lse)
        begin += rows


def test_rows_without_tokens(active: str, kernels: None) -> None:
    """Their LSE is inf, as torch's backward kernel wants it."""
    q, k = on(active, data(5, HEADS, DIM), data(3, HEADS, DIM))
    cu_q, cu_k = (torch.tensor([0, n], dtype=torch.int32, device=active) for n in (5, 3))
    out, lse = varlen_attn(q, k, k, cu_q, cu_k, 5, 3, window_size=(-1, 0), return_aux=AuxRequest(lse=True))
    assert not out[:2].any() and bool((lse[:, :2] == torch.inf).all()) and bool(lse[:, 2:].isfinite().all())


class Own:
    """A kernel that was there before, which returns what it got."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.library = torch.library.Library("aten", "IMPL", "CPU")
        self.library.impl("_scaled_dot_product_flash_attention", self.dense)
        self.library.impl("_flash_attention_forward", self.forward)

    def dense(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *given: Any, **options: Any) -> Any:
        self.calls.append((given, options))
        forward = ATEN._flash_attention_forward  # as torch's own does, with views that need no gradient
        forward(*(t.detach().transpose(1, 2) for t in (q, k, v)), None, None, 1, 1, 0.0, False, False)
        return q.detach().clone(), q.new_zeros(1), None, None, 1, 2, q.new_zeros(1), q.new_zeros(1), q.new_zeros(1)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *given: Any, **options: Any) -> Any:
        self.calls.append((given, options))
        return q.detach().clone(), q.new_zeros(1), q.new_zeros(1), q.new_zeros(1), q.new_zeros(1)


@pytest.fixture
def own() -> Iterator[Own]:
    own = Own()
    registration = torch_attention.register("CPU")
    yield own
    registration.remove()
    own.library._destroy()


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return data(1, HEADS, *shape).to(dtype)


DENSE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # tensors, and other arguments
    "dropout": ({}, {"dropout_p": 0.5}),
    "a gradient of q": ({"query": rows(5, DIM).requires_grad_()}, {}),
    "a gradient of v": ({"value": rows(5, DIM).requires_grad_()}, {}),
    "the gradient of a product": ({"query": rows(5, DIM).requires_grad_() * 2}, {}),
    "a debug mask": ({}, {"return_debug_mask": True}),
    "a type": ({n: rows(5, DIM, dtype=torch.float64) for n in ("query", "key", "value")}, {}),
    "types that differ": ({"key": rows(5, DIM).half()}, {}),
    "a head dimension": ({n: rows(5, 20) for n in ("query", "key", "value")}, {}),
    "values of other dimensions": ({"value": rows(5, 64)}, {}),
    "a column-major head": ({"query": rows(DIM, 5).transpose(2, 3)}, {}),
    "causal rows without tokens": ({"query": rows(9, DIM)}, {"is_causal": True}),
    "an empty batch": ({n: rows(5, DIM)[:0] for n in ("query", "key", "value")}, {}),
}


@pytest.mark.parametrize("name", DENSE)
def test_torchs_own_kernel_runs(name: str, own: Own, calls: list[str], kernels: None) -> None:
    tensors, options = DENSE[name]
    given = {"query": rows(5, DIM), "key": rows(5, DIM), "value": rows(5, DIM)} | tensors
    with torch.no_grad():
        found = ATEN._scaled_dot_product_flash_attention(**given, **options, scale=0.25)
    assert torch.equal(found[0], given["query"]) and len(own.calls) == 2
    assert own.calls[0][1] == {"scale": 0.25}
    given = {"query": rows(5, DIM), "key": rows(5, DIM), "value": rows(5, DIM)}
    ATEN._scaled_dot_product_flash_attention(**given)
    assert len(own.calls) == 2 and calls[-1:] == ["dense"]


@pytest.mark.parametrize("window", [(-1, 3), (2, 2), None])
def test_windows_to_the_right_and_rows_of_no_request_are_torchs(window: tuple[int, int] | None, own: Own) -> None:
    q, k, v, cu_q, cu_k = ragged("cpu")
    q, window = (q, window) if window else ([*q, q[0]], (-1, -1))
    varlen_attn(torch.cat(q), torch.cat(k), torch.cat(v), cu_q, cu_k, 17, 33, window_size=window, enable_gqa=True)
    assert len(own.calls) == 1 and own.calls[0][1]["window_size_right"] == window[1]


def test_gradients_of_varlen_are_torchs(own: Own, calls: list[str]) -> None:
    """The operator runs inside of an autograd function, where gradients are off."""
    q, k, v, cu_q, cu_k = ragged("cpu")
    given = (torch.cat(q).requires_grad_(), torch.cat(k), torch.cat(v), cu_q, cu_k, 17, 33)
    varlen_attn(*given, enable_gqa=True)
    assert len(own.calls) == 1 and not calls
    with torch.no_grad():
        varlen_attn(given[0].detach(), *given[1:], enable_gqa=True)
    assert len(own.calls) == 1 and calls == ["varlen"]


def test_without_a_kernel_before_the_reason_comes_out() -> None:
    registration = torch_attention.register("CPU")
    q = rows(5, DIM)
    with pytest.raises(CapabilityError, match="does not have dropout here"):
        ATEN._scaled_dot_product_flash_attention(q, q, q, 0.1)
    registration.remove()


def test_remove_gives_the_kernel_back(own: Own) -> None:
    q = rows(5, DIM)
    ATEN._scaled_dot_product_flash_attention(q, q, q)
    assert not own.calls
    own_only = torch_attention.register("CPU")
    own_only.remove()
    own_only.remove()


def test_registration_needs_no_card() -> None:
    """Importing registers and activates nothing; activating and restoring work in builds without CUDA."""
    program = (
        "import torch; before = torch.nn.attention.list_flash_attention_impls()\n"
        "import flashpage.torch_attention\n"
        "from torch.nn import attention as a\n"
        "assert a.list_flash_attention_impls() == sorted([*before, 'flashpage'])\n"
        "assert a.current_flash_attention_impl() is None\n"
        "a.activate_flash_attention_impl('flashpage'); assert a.current_flash_attention_impl() == 'flashpage'\n"
        "a.restore_flash_attention_impl(); assert a.current_flash_attention_impl() is None"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_compiled(active: str, kernels: None) -> None:
    """torch's shape functions hold: a compiled function gives the eager one's bits."""
    q, k, v, cu_q, cu_k = ragged(active)
    given = (torch.cat(q), torch.cat(k), torch.cat(v), cu_q, cu_k, 17, 33)
    function = lambda *given: varlen_attn(*given, window_size=(-1, 0), **GROUPED) * 2
    with torch.no_grad():
        assert torch.equal(torch.compile(function, backend="aot_eager", fullgraph=True)(*given), function(*given))


def sdpa(*given: torch.Tensor, **options: Any) -> torch.Tensor:
    with attention.sdpa_kernel(FLASH):
        return scaled_dot_product_attention(*given, **options)


@pytest.mark.cuda
@pytest.mark.parametrize("is_compiled", [False, True])
def test_public_function_on_a_card(is_compiled: bool, calls: list[str]) -> None:
    """Near torch's FA2; back to its bits after restore."""
    q, k, v = on("cuda", *(data(2, heads, 70, 64) for heads in (8, 2, 2)))
    function = torch.compile(sdpa, fullgraph=True) if is_compiled else sdpa
    before = sdpa(q, k, v, is_causal=True, enable_gqa=True)
    attention.activate_flash_attention_impl("flashpage")
    with torch.no_grad():
        found = function(q, k, v, is_causal=True, enable_gqa=True)
    attention.restore_flash_attention_impl()
    assert calls == ["dense"]
    torch.testing.assert_close(found, before, rtol=2e-2, atol=2e-2)
    assert torch.equal(sdpa(q, k, v, is_causal=True, enable_gqa=True), before) and calls == ["dense"]


@pytest.mark.cuda
def test_gradients_on_a_card(calls: list[str]) -> None:
    """Eager training runs torch's kernels, bit by bit; compiled training runs ours forward, and torch's backward."""

    def grads(function: Any) -> list[torch.Tensor]:
        given = [t.requires_grad_() for t in on("cuda", *(data(2, 4, 70, 64, seed=i) for i in range(3)))]
        out = function(*given, is_causal=True)
        out.float().square().sum().backward()
        return [out, *(t.grad for t in given if t.grad is not None)]

    before = grads(sdpa)
    attention.activate_flash_attention_impl("flashpage")
    eager, compiled = grads(sdpa), grads(torch.compile(sdpa, fullgraph=True))
    attention.restore_flash_attention_impl()
    assert all(torch.equal(a, b) for a, b in zip(eager, before, strict=True))
    for found, expected in zip(compiled, before, strict=True):
        torch.testing.assert_close(found, expected, rtol=4e-2, atol=4e-2)


@pytest.mark.cuda
def test_ragged_keys_in_a_graph_are_torchs(calls: list[str]) -> None:
    """Their lengths cannot come to the host there; dense batches are planned from shapes and stay ours."""
    q, k, v, cu_q, cu_k = ragged("cuda")
    q, k, v = (torch.cat(t) for t in (q, k, v))

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        rows = q[None].transpose(1, 2)
        return varlen_attn(q, k, v, cu_q, cu_k, 17, 33, **GROUPED), sdpa(rows, rows, rows)

    expected = step()
    attention.activate_flash_attention_impl("flashpage")
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    attention.restore_flash_attention_impl()
    graph.replay()
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
    assert calls == ["varlen", "dense"] * 2


@reads_pages
@pytest.mark.cuda
def test_captured_paged_decode() -> None:
    """Lengths and tables are read at every replay."""
    lengths = (20, 5, 33)
    q, *tokens = on("cuda", data(3, HEADS, DIM), *(data(n, KV_HEADS, DIM, seed=n) for n in lengths * 2))
    (k_cache, table), (v_cache, _) = pages_of(tokens[:3]), pages_of(tokens[3:])
    cu_q, used = torch.arange(4, dtype=torch.int32, device="cuda"), torch.ones(3, dtype=torch.int32, device="cuda")

    def step() -> torch.Tensor:
        given: dict[str, Any] = {"seqused_k": used, "block_table": table, "enable_gqa": True}
        return varlen_attn(q, k_cache, v_cache, cu_q, None, 1, 64, **given)

    attention.activate_flash_attention_impl("flashpage")
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    attention.restore_flash_attention_impl()
    used.copy_(torch.tensor(lengths, dtype=torch.int32))
    graph.replay()
    for i, (k, v) in enumerate(zip(tokens[:3], tokens[3:], strict=True)):
        near(out[i : i + 1], reference(q[i : i + 1], k, v)[0])
