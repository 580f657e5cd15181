"""Functions and operators on a card: merging and appending compared with the CPU's results, opcheck, torch.compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from steps import Steps, decode_cases, prefill_cases

import flashpage
from flashpage.wrappers import operators  # noqa: F401, registers the operators

pytestmark = pytest.mark.cuda
DEVICE = "cuda:0"
FLOATS = {torch.float32: 4e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}  # a unit in the last place; fp32: sums
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


# ---------------------------------------------------------------- merging


def states(dtype: torch.dtype, heads: int, dim: int, num_states: int) -> tuple[torch.Tensor, torch.Tensor]:
    """States [rows, states, heads, dim] and LSEs: some states have no tokens, some LSEs are far apart, and one row has
    no tokens in any state."""
    generator = torch.Generator().manual_seed(heads * dim + num_states)
    rows = 37
    v = torch.randn(rows, num_states, heads, dim, generator=generator).to(dtype)
    s = 20 * torch.randn(rows, num_states, heads, generator=generator)
    s[torch.rand(s.shape, generator=generator) < 0.2] = -torch.inf
    s[5] = -torch.inf
    return v, s


def assert_close_states(found: Any, expected: Any, dtype: torch.dtype) -> None:
    for x, y, rtol in zip(found, expected, (FLOATS[dtype], 1e-6), strict=True):
        torch.testing.assert_close(x.cpu(), y, rtol=rtol, atol=4e-6)


SHAPES = [(1, 64), (4, 128), (32, 128), (3, 40), (8, 256), (2, 512)]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("heads", "dim"), SHAPES)
def test_merges_are_the_cpus(heads: int, dim: int, dtype: torch.dtype) -> None:
    for num_states in (1, 2, 7, 65):
        v, s = states(dtype, heads, dim, num_states)
        expected = flashpage.merge_states(v, s)
        assert_close_states(flashpage.merge_states(v.to(DEVICE), s.to(DEVICE)), expected, dtype)
    v, s = states(dtype, heads, dim, 2)
    pair = (v[:, 0].contiguous(), s[:, 0].contiguous(), v[:, 1].contiguous(), s[:, 1].contiguous())
    on_card = tuple(tensor.to(DEVICE) for tensor in pair)
    expected = flashpage.merge_state(*pair)
    assert_close_states(flashpage.merge_state(*on_card), expected, dtype)
    strided = (on_card[0].repeat(1, 2, 1)[:, :heads], on_card[1], on_card[2].repeat(1, 2, 1)[:, :heads], on_card[3])
    assert_close_states(flashpage.merge_state(*strided), expected, dtype)
    for mask in (None, torch.arange(len(v)) % 3 == 0):
        here, there = [t.clone() for t in pair], [t.clone() for t in on_card]
        flashpage.merge_state_in_place(*here, mask=mask)
        flashpage.merge_state_in_place(*there, mask=None if mask is None else mask.to(DEVICE))
        assert_close_states(there[:2], here[:2], dtype)


# ---------------------------------------------------------------- appending


def numbers(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Random bits, NaN among them: appending copies bytes."""
    size = (*shape[:-1], shape[-1] * dtype.itemsize)
    generator = torch.Generator().manual_seed(shape[0])
    return torch.randint(0, 256, size, dtype=torch.uint8, generator=generator).view(dtype)


@pytest.mark.parametrize("dtype", [*FLOATS, *FP8], ids=str)
@pytest.mark.parametrize("form", ["one tensor", "pair", "values of another length"])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_appended_bytes_are_the_cpus(kv_layout: str, form: str, dtype: torch.dtype) -> None:
    page, heads, dim, lens, before = 16, 3, 64, [40, 7, 0, 129], [33, 0, 0, 16]
    dim_v = 40 if form == "values of another length" else dim
    counts = [-(-n // page) for n in lens]
    generator = torch.Generator().manual_seed(1)
    indices = torch.randperm(sum(counts), generator=generator)
    indptr = torch.tensor([0, *counts]).cumsum(0)
    last = torch.tensor([n - max(c - 1, 0) * page for n, c in zip(lens, counts, strict=True)])
    append_indptr = torch.tensor([0, *(n - b for n, b in zip(lens, before, strict=True))]).cumsum(0)
    fillers = 5
    nnz = int(append_indptr[-1]) + fillers
    requests, positions = flashpage.get_batch_indices_positions(append_indptr, torch.tensor(lens), nnz)
    assert requests[-fillers:].tolist() == [-1] * fillers
    qkv = numbers(nnz, heads + 2, dim, dtype=dtype)  # keys within wider rows
    value = numbers(nnz + 1, heads, dim_v, dtype=dtype)[:nnz]
    inner = lambda d: (page, heads, d) if kv_layout == "NHD" else (heads, page, d)
    if form == "one tensor":
        cache: Any = numbers(sum(counts), 2, *inner(dim), dtype=dtype)
    else:
        cache = tuple(numbers(sum(counts), *inner(d), dtype=dtype) for d in (dim, dim_v))

    def append(device: str, index_type: torch.dtype) -> list[torch.Tensor]:
        parts = [cache] if isinstance(cache, torch.Tensor) else list(cache)
        copies = [part.to(device, copy=True) for part in parts]
        on_device = [t.to(device, index_type) for t in (requests, positions, indices, indptr, last)]
        whole = copies[0] if len(copies) == 1 else tuple(copies)
        key = qkv.to(device)[:, :heads]
        flashpage.append_paged_kv_cache(
            key, value.to(device), *on_device[:2], whole, *on_device[2:], kv_layout=kv_layout
        )
        return [copy.cpu().view(torch.uint8) for copy in copies]

    expected = append("cpu", torch.int32)
    parts = [cache] if isinstance(cache, torch.Tensor) else cache
    assert not any(torch.equal(x, y.view(torch.uint8)) for x, y in zip(expected, parts, strict=True))
    for index_type in (torch.int32, torch.int64):
        for x, y in zip(append(DEVICE, index_type), expected, strict=True):
            assert torch.equal(x, y)


def test_positions_are_the_cpus() -> None:
    append_indptr, lens = torch.tensor([0, 7, 7, 8, 30]), torch.tensor([40, 3, 1, 22])
    expected = flashpage.get_batch_indices_positions(append_indptr, lens, 33)
    found = flashpage.get_batch_indices_positions(append_indptr.to(DEVICE), lens.to(DEVICE), 33)
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x.cpu(), y)


# ---------------------------------------------------------------- operators


@pytest.fixture(scope="module")
def steps() -> Steps:
    return Steps(decode_cases(name="ops"), DEVICE)


def run_arguments(wrapper: Any, q: torch.Tensor, parts: list[torch.Tensor]) -> tuple[Any, ...]:
    lse = torch.empty(q.shape[:2], device=DEVICE)
    return (wrapper._attention.handle, q, parts, torch.empty_like(q), lse, *wrapper._values(None), *(None,) * 8)


def test_opcheck_run(steps: Steps) -> None:
    wrapper = steps.wrapper()
    steps.plan(wrapper, 0)
    q, cache = steps.own_q[0], steps.own_cache[0].nan_to_num()
    run = torch.ops.flashpage.run_paged.default
    for parts in ([cache], [cache[:, 0], cache[:, 1]]):
        torch.library.opcheck(run, run_arguments(wrapper, q, parts))
    paged = Steps(prefill_cases(count=1, name="ops"), DEVICE)
    wrapper = paged.wrapper()
    paged.plan(wrapper, 0)
    torch.library.opcheck(run, run_arguments(wrapper, paged.own_q[0], [paged.own_cache[0].nan_to_num()]))
    ragged = flashpage.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8, device=DEVICE))
    indptr = torch.tensor([0, 5, 12], dtype=torch.int32)
    ragged.plan(indptr, indptr, 4, 2, 64, causal=True, q_data_type=torch.bfloat16)
    rows = torch.randn(12, 8, 64, device=DEVICE).to(torch.bfloat16)
    arguments = run_arguments(ragged, rows[:, :4].contiguous(), [rows[:, 4:6].contiguous(), rows[:, 6:].contiguous()])
    torch.library.opcheck(torch.ops.flashpage.run_ragged.default, arguments)


def test_opcheck_functions() -> None:
    v, s = (tensor.to(DEVICE) for tensor in states(torch.float16, 4, 64, 3))
    pair = [tensor.contiguous() for tensor in (v[:, 0], s[:, 0], v[:, 1], s[:, 1])]
    torch.library.opcheck(torch.ops.flashpage.merge_states.default, (v, s))
    torch.library.opcheck(torch.ops.flashpage.merge_state.default, tuple(pair))
    for mask in (None, torch.arange(len(v), device=DEVICE) % 2 == 0):
        torch.library.opcheck(torch.ops.flashpage.merge_state_in_place.default, (*pair, mask))
    new = torch.randn(4, 2, 64, device=DEVICE).half()
    indices = [torch.tensor(n, dtype=torch.int32, device=DEVICE) for n in ([0, 0, 1, 1], [0, 17, 1, 2], [5, 2, 7])]
    indptr = torch.tensor([0, 2, 3], dtype=torch.int32, device=DEVICE)
    cache = torch.zeros(8, 2, 16, 2, 64, dtype=torch.float16, device=DEVICE)
    arguments = (new, new, *indices, indptr, [cache], "NHD")
    torch.library.opcheck(torch.ops.flashpage.append_paged_kv_cache.default, arguments)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_decode_step_compiles_whole(backend: str, steps: Steps) -> None:
    """Append and two layers in one graph; a new plan compiles nothing, and attention reads the appended keys."""
    if backend == "inductor":
        pytest.importorskip("triton")
    wrapper, kv_heads = steps.wrapper(), steps.cases[0].num_kv_heads
    lens, batch = steps.cases[4].kv_lens, len(steps.cases[4].kv_lens)
    assert min(lens) > 0
    inputs, pages = steps.inputs[4], steps.indices[4]
    where = [t.to(DEVICE) for t in (torch.arange(batch), torch.tensor(lens) - 1)]
    indptr, last = inputs.indptr.to(DEVICE), inputs.last_page_len.to(DEVICE)

    def step(q: torch.Tensor, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        new = q[:, :kv_heads] * 2
        flashpage.append_paged_kv_cache(new, new + 1, *where, cache, pages, indptr, last)
        x, _ = wrapper.run(q, cache, return_lse=True)
        return wrapper.run(x + q, cache, window_left=100), x

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    steps.plan(wrapper, 4)
    for turn in range(3):
        steps.plan(wrapper, 4, fixed_split_size=(None, 4, 16)[turn])
        q = steps.own_q[4] + turn
        caches = [steps.own_cache[4].clone() for _ in range(2)]
        with torch.compiler.set_stance("default" if turn == 0 else "fail_on_recompile"):
            found = compiled(q, caches[0])
        expected = step(q, caches[1])
        assert torch.equal(*(cache.view(torch.int16) for cache in caches))
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x, y)
