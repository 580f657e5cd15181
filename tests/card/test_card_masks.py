"""Custom masks and mask functions on a card: the tiles that the card finds, equal bits in whichever order units are
claimed, and masks that change under a captured graph.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from inputs import pack_bits
from native_build import function_tiles
from native_build import mask_tiles as native
from variant_build import variant_args

import flashpage
from flashpage import Variant
from flashpage import native as host

pytestmark = pytest.mark.cuda
DEVICE = "cuda:0"
HEADS, KV_HEADS, DIM = 8, 2, 128
Q_LENS, KV_LENS = (900, 300, 1), (2100, 300, 700)


def indptr(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def rows(lengths: tuple[int, ...], heads: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sum(lengths), heads, DIM, generator=generator).to(DEVICE, torch.bfloat16)


def masks(seed: int) -> list[torch.Tensor]:
    """Causal, except for islands of tokens that no row sees."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for q, kv in zip(Q_LENS, KV_LENS, strict=True):
        mask = torch.arange(kv)[None] <= kv - q + torch.arange(q)[:, None]
        hidden = torch.rand(q // 100 + 1, kv // 300 + 1, generator=generator) < 0.4
        mask &= ~hidden[torch.arange(q)[:, None] // 100, torch.arange(kv)[None] // 300]
        found.append(mask)
    return found


def planned(**values: Any) -> Any:
    workspace = torch.empty(64 << 20, dtype=torch.uint8, device=DEVICE)
    wrapper = flashpage.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
    plan(wrapper, **values)
    return wrapper


def plan(wrapper: Any, **values: Any) -> None:
    wrapper.plan(indptr(Q_LENS), indptr(KV_LENS), HEADS, KV_HEADS, DIM, q_data_type=torch.bfloat16, **values)


@pytest.fixture(scope="module")
def tensors() -> tuple[torch.Tensor, ...]:
    return rows(Q_LENS, HEADS, 1), rows(KV_LENS, KV_HEADS, 2), rows(KV_LENS, KV_HEADS, 3)


def exact(tensors: tuple[torch.Tensor, ...], given: list[torch.Tensor]) -> torch.Tensor:
    """Attention in fp64, with zeros for rows that see nothing."""
    q, k, v = (t.double() for t in tensors)
    outs = []
    parts = zip(q.split(Q_LENS), k.split(KV_LENS), v.split(KV_LENS), given, strict=True)
    for q_rows, keys, values, mask in parts:
        keys, values = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", q_rows, keys) * DIM**-0.5
        scores.masked_fill_(~mask.to(DEVICE), -torch.inf)
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1).nan_to_num(0.0), values))
    return torch.cat(outs)


def test_a_card_finds_the_tiles_that_the_host_finds(tensors: tuple[torch.Tensor, ...]) -> None:
    packed = pack_bits(masks(1))
    wrapper = planned(packed_custom_mask=packed.to(DEVICE))
    if wrapper._attention._last_option_plan().prepared.mask_tiles is None:
        pytest.skip("this card's kernel takes no mask tiles")
    wrapper.run(*tensors)
    check_tiles(wrapper, packed.data_ptr(), lambda params: native().find_mask_tiles(params, 3))


def check_tiles(wrapper: Any, bits: int | None, find: Callable[[Any], None]) -> None:
    """Compares the tiles after the last run with those that `find` finds on the host."""
    planner, option_plan = wrapper._planner, wrapper._attention._last_option_plan()
    found = option_plan.mask_tiles.cells.tensor.cpu()
    option_plan.mask_tiles.bind(planner.batch, option_plan.prepared, option_plan.slot)
    params = host.MaskTilesParams.from_buffer_copy(option_plan.mask_tiles.params)
    plan_bytes = np.frombuffer(option_plan.slot.last_bytes(), np.uint8).copy()
    on_host = torch.zeros_like(found)
    params.plan, params.custom_mask, params.cells = plan_bytes.ctypes.data, bits, on_host.data_ptr()
    find(ctypes.byref(params))
    num_units = int(on_host[0]) & 0xFFFFFFFF
    assert int(found[0]) & 0xFFFFFFFF == num_units
    assert int(found[0]) >> 32 == 0, "the last claim leaves the queue as it was"
    assert torch.equal(found[2 : params.queue_begin], on_host[2 : params.queue_begin])
    queues = [
        sorted(map(tuple, cells[params.queue_begin :][: 4 * num_units].reshape(-1, 4).tolist()))
        for cells in (found, on_host)
    ]
    assert queues[0] == queues[1]


def test_bits_are_looked_at_once_a_plan(tensors: tuple[torch.Tensor, ...]) -> None:
    """Every run of the plan reads the same tiles: captured runs, and runs with their own options."""
    bits = pack_bits(masks(7)).to(DEVICE)
    wrapper = planned(packed_custom_mask=bits)
    wrapper.run(*tensors)
    if wrapper._attention._last_option_plan().prepared.mask_tiles is None:
        pytest.skip("this card's kernel takes no mask tiles")
    assert wrapper._attention._last_option_plan().mask_tiles.are_found(wrapper._planner.generation)
    expected = exact(tensors, masks(7))
    in_window = [
        mask & (torch.arange(kv) >= torch.arange(kv - q, kv)[:, None] - 300)
        for mask, q, kv in zip(masks(7), Q_LENS, KV_LENS, strict=True)
    ]
    for _ in range(3):
        out = wrapper.run(*tensors)
        assert (out.double() - expected).norm() < 2**-7 * expected.norm()
        out = wrapper.run(*tensors, window_left=300)
        windowed = exact(tensors, in_window)
        assert (out.double() - windowed).norm() < 2**-7 * windowed.norm()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        out = wrapper.run(*tensors)
    for _ in range(2):
        graph.replay()
        assert (out.double() - expected).norm() < 2**-7 * expected.norm()
        out.zero_()
    plan(wrapper, packed_custom_mask=pack_bits(masks(8)).to(DEVICE))
    out = wrapper.run(*tensors)
    expected = exact(tensors, masks(8))
    assert (out.double() - expected).norm() < 2**-7 * expected.norm()


def test_the_same_bits_in_any_order_of_claims(tensors: tuple[torch.Tensor, ...]) -> None:
    wrapper = planned(packed_custom_mask=pack_bits(masks(2)).to(DEVICE))
    first, lse = wrapper.run(*tensors, return_lse=True)
    assert (first.double() - exact(tensors, masks(2))).norm() < 2**-7 * first.double().norm()
    for enable_pdl in (True, False) * 5:
        out, again = wrapper.run(*tensors, return_lse=True, enable_pdl=enable_pdl)
        assert torch.equal(out, first) and torch.equal(again, lse)


def test_layers_follow_each_other(tensors: tuple[torch.Tensor, ...]) -> None:
    """A layer's launches overwrite tiles and queue of the layer before, and must not disturb it."""
    q, k, v = tensors
    wrapper = planned(packed_custom_mask=pack_bits(masks(3)).to(DEVICE))
    expected = q
    for _ in range(6):
        expected = wrapper.run(expected, k, v, enable_pdl=False)
        torch.cuda.synchronize()
    out = q
    for _ in range(6):
        out = wrapper.run(out, k, v)
    assert torch.equal(out, expected)


def test_a_mask_that_changes_under_a_graph(tensors: tuple[torch.Tensor, ...]) -> None:
    """A replay looks for tiles in the bits at that time."""
    buffers = [torch.zeros(len(Q_LENS) + 1, dtype=torch.int32, device=DEVICE) for _ in range(3)]
    bits = torch.zeros(1 << 20, dtype=torch.uint8, device=DEVICE)
    wrapper = flashpage.BatchPrefillWithRaggedKVCacheWrapper(
        torch.empty(64 << 20, dtype=torch.uint8, device=DEVICE),
        use_cuda_graph=True,
        qo_indptr_buf=buffers[0],
        kv_indptr_buf=buffers[1],
        custom_mask_buf=bits,
        mask_indptr_buf=buffers[2],
    )
    plan(wrapper, packed_custom_mask=pack_bits(masks(4)).to(DEVICE))
    out = wrapper.run(*tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        wrapper.run(*tensors, out=out)
    for seed in (5, 6):
        changed = pack_bits(masks(seed)).to(DEVICE)
        bits[: changed.numel()] = changed
        graph.replay()
        assert (out.double() - exact(tensors, masks(seed))).norm() < 2**-7 * out.double().norm(), seed


def documents(ids: torch.Tensor) -> Callable[..., Any]:
    return lambda b, h, q_idx, kv_idx: (ids[b, q_idx] == ids[b, kv_idx]) & (kv_idx <= q_idx)


def reach_of_heads(reach: torch.Tensor) -> Callable[..., Any]:
    return lambda b, h, q_idx, kv_idx: (q_idx - kv_idx < reach[h]) & (kv_idx - q_idx < 50)


IDS = torch.sort(torch.randint(0, 12, (len(Q_LENS), max(KV_LENS)), generator=torch.Generator().manual_seed(4)))[0].int()
REACH = torch.arange(HEADS, dtype=torch.int32) * 170 % 900
FUNCTIONS = [(documents, IDS), (reach_of_heads, REACH)]
OPTIONS: list[dict[str, Any]] = [{}, {"causal": True}, {"window_left": 333, "fixed_split_size": 512}]


def seen(mask_mod: Callable[..., Any], causal: bool = False, window_left: int = -1, **_: Any) -> list[torch.Tensor]:
    """The tokens that each request's rows see, [heads, rows, tokens]."""
    found = []
    for b, (q, kv) in enumerate(zip(Q_LENS, KV_LENS, strict=True)):
        q_idx, kv_idx = torch.arange(kv - q, kv)[:, None], torch.arange(kv)[None]
        mask = torch.stack([mask_mod(b, h, q_idx, kv_idx).expand(q, kv) for h in range(HEADS)])
        mask &= (kv_idx <= q_idx) if causal else True
        mask &= (kv_idx >= q_idx - window_left) if window_left >= 0 else True
        found.append(mask)
    return found


@pytest.mark.parametrize("options", OPTIONS, ids=["all", "causal", "window"])
@pytest.mark.parametrize(("function", "captured"), FUNCTIONS, ids=["documents", "heads"])
def test_tiles_of_functions(
    function: Callable[..., Any], captured: torch.Tensor, options: dict[str, Any], tensors: tuple[torch.Tensor, ...]
) -> None:
    wrapper = planned(variant=Variant(mask_mod=function(captured.to(DEVICE))), **options)
    if wrapper._attention._last_option_plan().prepared.mask_tiles is None:
        pytest.skip("this card's kernel takes no mask tiles")
    out, lse = wrapper.run(*tensors, return_lse=True)
    expected = exact(tensors, seen(function(captured), **options))
    assert (out.double() - expected).norm() < 2**-7 * expected.norm()
    on_host = Variant(mask_mod=function(captured)).traced()
    args, ask = variant_args(on_host), function_tiles(on_host.spec)
    check_tiles(wrapper, None, lambda params: ask(params, ctypes.byref(args), 3))
    for enable_pdl in (True, False) * 3:
        again = wrapper.run(*tensors, return_lse=True, enable_pdl=enable_pdl)
        assert torch.equal(again[0], out) and torch.equal(again[1], lse)


def test_a_captured_tensor_that_changes_under_a_graph(tensors: tuple[torch.Tensor, ...]) -> None:
    """A replay looks for tiles in the function's tensor at that time."""
    ids = IDS.to(DEVICE)
    wrapper = planned(variant=Variant(mask_mod=documents(ids)))
    out = wrapper.run(*tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        wrapper.run(*tensors, out=out)
    for changed in (IDS // 3, IDS.flip(1)):
        ids.copy_(changed)
        graph.replay()
        expected = exact(tensors, seen(documents(changed)))
        assert (out.double() - expected).norm() < 2**-7 * expected.norm()
