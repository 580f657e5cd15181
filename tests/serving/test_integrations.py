"""The engine's side of attention: pools, indices, and the backend's dispatch and steps, compared with fp64."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import re
from typing import Any

import pytest
import torch
from paged_past import DIM, KV_HEADS, PLAIN, Q_HEADS, Past, check, dtype_of, run_layer

from flashpage import FlashpageError, RunError
from flashpage.errors import CapabilityError
from flashpage.integrations import (
    AttentionLayer,
    ForwardMode,
    PagedAttention,
    RequestTable,
    TokenPool,
    gather_slots,
    tree_mask,
)
from flashpage.serving.kv_parts import KvPart

# ---------------------------------------------------------------- gathering


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("lens", [[0], [1], [700], [5, 0, 33, 16, 1, 200], [2] * 300], ids=lambda lens: str(len(lens)))
@pytest.mark.parametrize("with_starts", [False, True], ids=["whole rows", "from a token in the row"])
def test_gathered_pages(with_starts: bool, lens: list[int], page_size: int, device: str) -> None:
    generator = torch.Generator().manual_seed(1)
    columns = 1024
    table = torch.randperm(400 * columns // page_size, generator=generator).to(torch.int32)[
        : 400 * (columns // page_size)
    ]
    table = (table[:, None] * page_size + torch.arange(page_size)).to(torch.int32).view(400, -1)
    wider = torch.zeros(400, table.shape[1] + 7, dtype=torch.int32)  # the distance between rows exceeds their length
    wider[:, : table.shape[1]] = table
    rows = torch.randperm(400, generator=generator)[: len(lens)].to(torch.int32)
    starts = torch.arange(len(lens), dtype=torch.int32) % 4 * page_size if with_starts else None
    pages = [-(-n // page_size) for n in lens]
    indptr = torch.tensor([0, *itertools.accumulate(pages)], dtype=torch.int32)
    indices = torch.full((sum(pages) + 3,), -7, dtype=torch.int32, device=device)
    on_device = [t.to(device) for t in (wider, rows, indptr)]
    gather_slots(*on_device, indices, None if starts is None else starts.to(device), page_size)
    expected = []
    for r, count in enumerate(pages):
        first = 0 if starts is None else int(starts[r])
        expected += [int(table[rows[r], first + i * page_size]) // page_size for i in range(count)]
    assert indices.tolist() == [*expected, -7, -7, -7]


def test_gathering_tells_bad_numbers() -> None:
    table, one = torch.zeros(4, 32, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    indptr, room = torch.tensor([0, 2], dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    for arguments, told in (
        ((table.long(), one, indptr, room), "table has shape"),
        ((table, one, indptr[:1], room), "indptr has 1 entries but rows has 1: pass 2"),
        ((table, one * 4, indptr, room), "rows has numbers from 4 to 4 but table has 4 rows"),
        ((table, one, indptr.flip(0), room), "indptr must rise from 0 to at most 8"),
        ((table, one, indptr * 40, room), "indptr must rise from 0 to at most 8"),
        ((table, one, indptr, room, None, 32), "past the 32 tokens"),
        ((table, one, indptr, room, one * 31), "past the 32 tokens"),
        ((table, one, indptr, room, None, 0), "page_size=0 is out of range"),
        ((table, one, torch.tensor([0, 3]).int(), room, None, 2**30), "past the 32 tokens"),
        ((table, one, indptr, room, indptr), "starts has 2 entries but rows has 1: pass 1"),
    ):
        with pytest.raises(RunError, match=told):
            gather_slots(*arguments)  # type: ignore[arg-type]


# ---------------------------------------------------------------- pools


def test_rows_of_the_request_table() -> None:
    table = RequestTable(2, 8)
    rows = [table.acquire(), table.acquire()]
    assert sorted(rows) == [0, 1] and table.num_free == 0
    with pytest.raises(FlashpageError, match="all 2 rows"):
        table.acquire()
    table.release(rows[0])
    assert table.acquire() == rows[0]
    table.write(torch.tensor([0, 1], dtype=torch.int32), torch.tensor([3, 0]), torch.tensor([40, 50]).int())
    assert table.slots[0, 3] == 40 and table.slots[1, 0] == 50 and table.slots.count_nonzero() == 2


def test_rows_are_released_once() -> None:
    table = RequestTable(2, 8)
    table.release(table.acquire())
    with pytest.raises(FlashpageError, match="row=1 belongs to no request"):
        table.release(1)
    with pytest.raises(FlashpageError, match="max_context=0 is out of range: pass at least 1"):
        RequestTable(2, 0)
    with pytest.raises(FlashpageError, match="page_size=0 is out of range: pass at least 1"):
        TokenPool(4, 0, 1, 1, 16, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn], ids=str)
def test_values_come_back_from_their_slots(dtype: torch.dtype, device: str) -> None:
    pool = TokenPool(6, 4, 2, KV_HEADS, DIM, dtype, device)
    slots = torch.tensor([23, 4, 9], dtype=torch.int32, device=device)
    k, v = torch.randn(2, 3, KV_HEADS, DIM, device=device).half()
    scales = {} if dtype is torch.float16 else {"k_scale": 0.25, "v_scale": 2.0}
    pool.write(1, slots, k, v, **scales)
    assert pool.kv(0).float().count_nonzero() == 0
    for part, values, scale in ((0, k, scales.get("k_scale", 1)), (1, v, scales.get("v_scale", 1))):
        found = pool.kv(1)[:, part].float().flatten(0, 1)
        torch.testing.assert_close(found[slots.long()] * scale, values.float(), rtol=0.07, atol=0.01)
        found[slots.long()] = 0
        assert found.count_nonzero() == 0


@pytest.mark.parametrize("v_head_dim", [None, 16], ids=["K and V", "latent rows"])
def test_later_writes_are_checked_too(v_head_dim: int | None, device: str) -> None:
    """The first write of a form is checked in all, later ones by what may differ; each goes to its own layer."""
    heads = 1 if v_head_dim else KV_HEADS
    pool = TokenPool(6, 4, 2, heads, DIM, dtype_of(device), device, v_head_dim=v_head_dim)
    rows = torch.randn(12, 2, heads, DIM, device=device).to(pool.dtype)  # K and V of a token lie next to each other
    places = torch.tensor([23, 4, 9, 7, 20], dtype=torch.int32, device=device)
    for layer, begin, count in ((0, 0, 3), (1, 3, 5), (0, 8, 1), (1, 9, 2)):
        k, v, slots = (t[begin : begin + count] for t in (rows[:, 0], rows[:, 1], places.repeat(3)))
        version = pool.kv(layer)._version
        pool.write(layer, slots, k, v)
        assert pool.kv(layer)._version > version
        found = pool.kv(layer).flatten(0, 1) if v_head_dim else pool.kv(layer).transpose(1, 2).flatten(0, 1)
        assert torch.equal(found[slots.long()], k[:, 0] if v_head_dim else rows[begin : begin + count])
    k, v, slots = rows[:3, 0], rows[:3, 1], places[:3]
    many = torch.zeros(30, dtype=torch.int32, device=device), *(part.repeat(10, 1, 1) for part in (k, v))
    with pytest.raises(FlashpageError) as told:
        TokenPool(6, 4, 1, heads, DIM, pool.dtype, device, v_head_dim=v_head_dim).write(0, *many)
    pool.write(0, *(part[:3] for part in many))
    with pytest.raises(FlashpageError, match=re.escape(str(told.value))):
        pool.write(0, *many)  # more tokens than the pool has slots
    wrong = [(slots, k[:2], v[:2]), (slots.float(), k, v), (slots, k.double()[..., :5], v), (slots, k[..., ::2], v)]
    if device == "cpu":
        wrong += [(slots + 1, k, v), (slots - 5, k, v)]
    for arguments in wrong:
        with pytest.raises(FlashpageError, match="slots|k"):
            pool.write(0, *arguments)
    pool.write(0, slots[:0], k[:0], v[:0])
    pool.write(0, slots.long(), k, v)
    assert torch.equal(
        pool.kv(0).flatten(0, 1)[23] if v_head_dim else pool.kv(0)[5, :, 3], k[0, 0] if v_head_dim else rows[0]
    )


def test_a_pool_without_memory_is_reported(device: str) -> None:
    """Also by a write of a form that the pool knows."""
    pool = TokenPool(6, 4, 1, KV_HEADS, DIM, dtype_of(device), device)
    k, slots = torch.randn(3, KV_HEADS, DIM, device=device), torch.arange(3, dtype=torch.int32, device=device)
    pool.write(0, slots, k, k)
    pool.kv(0).untyped_storage().resize_(0)
    with pytest.raises(FlashpageError, match="storage was resized to 0"):
        pool.write(0, slots, k, k)


def test_a_copy_of_a_pool_writes_to_its_own_memory(device: str) -> None:
    pool = TokenPool(6, 4, 1, KV_HEADS, DIM, dtype_of(device), device)
    k, slots = torch.randn(3, KV_HEADS, DIM, device=device), torch.arange(3, dtype=torch.int32, device=device)
    pool.write(0, slots, k, k)
    copied, before = copy.deepcopy(pool), pool.kv(0).clone()
    for _ in range(2):
        copied.write(0, slots, 2 * k, 2 * k)
    assert torch.equal(pool.kv(0), before) and torch.equal(copied.kv(0), 2 * before)


def test_a_pool_keeps_few_forms(device: str) -> None:
    """Rows of heads that lie apart have a stride that grows with their number."""
    pool = TokenPool(30, 4, 1, KV_HEADS, DIM, dtype_of(device), device)
    for count in range(1, 101):
        k, slots = torch.randn(KV_HEADS, count, DIM, device=device).transpose(0, 1), torch.arange(count, device=device)
        pool.write(0, slots.int(), k, k)
    assert 0 < len(pool._launches) <= 64
    assert torch.equal(pool.kv(0).transpose(1, 2).flatten(0, 1)[:100, 0], k.to(pool.dtype))


# ---------------------------------------------------------------- the backend

LENS = [70, 1, 33, 128]


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("options", [{}, {"logits_soft_cap": 5.0, "sm_scale": 0.3}], ids=["plain", "soft cap"])
def test_decode(options: dict[str, Any], page_size: int, device: str) -> None:
    """Layers whose options differ from the first one's pass them to run."""
    layers = [PLAIN, dataclasses.replace(PLAIN, index=1, **options)]
    past = Past.make(LENS, device, page_size, len(layers))
    backend = PagedAttention(past.table, past.pool, layers, dtype_of(device))
    batch = past.batch(ForwardMode.DECODE, [1] * 4, LENS)
    backend.init_forward_metadata(batch)
    for layer in layers:
        past.fill(layer, [n - 1 for n in LENS])
        q, found = run_layer(backend, past, layer, batch, [0] * 4)
        check(found, q, past, layer, batch, [0] * 4, LENS)


@pytest.mark.parametrize("ragged", [False, True], ids=["paged", "ragged and paged"])
@pytest.mark.parametrize("new", [[20, 1, 33, 7], [70, 1, 33, 128]], ids=["over prefixes", "no prefix"])
def test_extend(new: list[int], ragged: bool, device: str) -> None:
    """Chunks over earlier tokens in the pool; without a prefix the ragged wrapper has everything."""
    past = Past.make(LENS, device, 16, 1)
    backend = PagedAttention(past.table, past.pool, [PLAIN], dtype_of(device), ragged_extend=ragged)
    batch = past.batch(ForwardMode.EXTEND, new, LENS)
    past.fill(PLAIN, [n - m for n, m in zip(LENS, new, strict=True)])
    backend.init_forward_metadata(batch)
    assert (backend.metadata.ragged is not None) == ragged  # type: ignore[union-attr]
    assert backend.metadata.extend_no_prefix == (ragged and new == LENS)  # type: ignore[union-attr]
    q, found = run_layer(backend, past, PLAIN, batch, [0] * 4)
    check(found, q, past, PLAIN, batch, [0] * 4, LENS)
    slots = past.slots[0][LENS[0] - new[0] :].to(past.pool.kv(0).device)
    assert not past.pool.kv(0)[:, 0].flatten(0, 1)[slots].isnan().any()  # new tokens are in the pool, for later steps


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.EXTEND])
@pytest.mark.parametrize("page_size", [1, 16])
def test_sliding_window_beside_full_layers(page_size: int, mode: ForwardMode, device: str) -> None:
    """Two wrappers; the window's page table begins with the window, so earlier pages hold NaN."""
    window = dataclasses.replace(PLAIN, window_left=20)
    layers = [window, dataclasses.replace(PLAIN, index=1)]
    past = Past.make(LENS, device, page_size, 2)
    backend = PagedAttention(past.table, past.pool, layers, dtype_of(device))
    assert list(backend.parts) == [KvPart.WINDOW, KvPart.ALL]
    new = [1] * 4 if mode is ForwardMode.DECODE else [30, 1, 5, 60]
    batch = past.batch(mode, new, LENS)
    for layer in layers:
        past.fill(layer, [n - m for n, m in zip(LENS, new, strict=True)])
    backend.init_forward_metadata(batch)
    pages = backend.indices.update(batch, KvPart.WINDOW)
    seen = [n - max(0, n - m - 20) // page_size * page_size for n, m in zip(LENS, new, strict=True)]
    assert pages.indptr.diff().tolist() == [-(-n // page_size) for n in seen]
    for layer in layers:
        q, found = run_layer(backend, past, layer, batch, [0] * 4)
        check(found, q, past, layer, batch, [0] * 4, LENS)


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.EXTEND])
@pytest.mark.parametrize("page_size", [1, 16])
def test_cross_attention_beside_the_decoders_own(page_size: int, mode: ForwardMode, device: str) -> None:
    """The encoder's tokens come first; every row of a cross layer sees all of them, and none of the decoder's."""
    cross = AttentionLayer(1, Q_HEADS, KV_HEADS, DIM, is_cross=True)
    layers = [PLAIN, cross]
    encoder, own = [40, 16, 0, 55], [30, 1, 33, 64]
    skip = [-(-n // page_size) * page_size for n in encoder]
    past = Past.make([s + n for s, n in zip(skip, own, strict=True)], device, page_size, 2)
    backend = PagedAttention(past.table, past.pool, layers, dtype_of(device))
    assert list(backend.parts) == [KvPart.OWN, KvPart.ENCODER]
    new = [1] * 4 if mode is ForwardMode.DECODE else [30, 1, 8, 10]
    batch = past.batch(mode, new, own, skip, encoder_lens=torch.tensor(encoder, dtype=torch.int32))
    past.fill(PLAIN, [s + n - m for s, n, m in zip(skip, own, new, strict=True)])
    past.fill(cross, encoder)
    backend.init_forward_metadata(batch)
    q, found = run_layer(backend, past, PLAIN, batch, skip)
    check(found, q, past, PLAIN, batch, skip, own)
    q, found = run_layer(backend, past, cross, batch, skip)
    check(found, q, past, cross, batch, [0] * 4, encoder, causal=False)
    planned = backend.metadata.planned.values()  # type: ignore[union-attr]
    assert all(len(attention.session.active) == 1 for attention in planned)  # run used the planned options


def test_the_encoders_tokens_are_written_by_the_step_that_has_them(device: str) -> None:
    cross = AttentionLayer(1, Q_HEADS, KV_HEADS, DIM, is_cross=True)
    past = Past.make([40], device, 16, 2)
    backend = PagedAttention(past.table, past.pool, [PLAIN, cross], dtype_of(device))
    slots = past.slots[0][:20].int().to(device)
    lens = {"encoder_lens": torch.tensor([20], dtype=torch.int32), "encoder_slots": slots}
    batch = past.batch(ForwardMode.EXTEND, [8], [8], [32], **lens)
    backend.init_forward_metadata(batch)
    q = torch.randn(8, Q_HEADS, DIM, generator=torch.Generator().manual_seed(3)).to(dtype_of(device))
    k, v = past.k[1][0][:20].to(device), past.v[1][0][:20].to(device)
    found = backend.forward(q.to(device), k, v, cross, batch).cpu()
    check(found, q, past, cross, batch, [0], [20], causal=False)


def test_verifying_a_tree(device: str) -> None:
    """Each guess sees the known tokens and its own ancestors."""
    parents = [[-1, 0, 0, 2, 1], [-1], [-1, -1, 0, 1], [-1, 0, 1, 2]]
    new = [len(p) for p in parents]
    lens = [n + m for n, m in zip([40, 0, 17, 100], new, strict=True)]
    past = Past.make(lens, device, 16, 1)
    mask = tree_mask(parents, lens)
    masks = [
        m.view(a, b)
        for m, a, b in zip(mask.split([a * b for a, b in zip(new, lens, strict=True)]), new, lens, strict=True)
    ]
    assert masks[0][3, 40:].tolist() == [True, False, True, True, False]
    backend = PagedAttention(past.table, past.pool, [PLAIN], dtype_of(device))
    batch = past.batch(ForwardMode.VERIFY, new, lens, tree_mask=mask)
    past.fill(PLAIN, [n - m for n, m in zip(lens, new, strict=True)])
    backend.init_forward_metadata(batch)
    q, found = run_layer(backend, past, PLAIN, batch, [0] * 4)
    check(found, q, past, PLAIN, batch, [0] * 4, lens, masks=masks)


@pytest.mark.parametrize("layer", [PLAIN, dataclasses.replace(PLAIN, window_left=20)], ids=["all", "window"])
def test_requests_longer_than_the_table_are_told(layer: AttentionLayer, device: str) -> None:
    """A card would gather page numbers from the next row, and write them past a captured step's buffer."""
    past = Past.make([40, 17], device, 16, 1)
    backend = PagedAttention(past.table, past.pool, [layer], dtype_of(device))
    batch = past.batch(ForwardMode.DECODE, [1, 1], [40, 17])
    most = past.table.max_context
    backend.init_forward_metadata(dataclasses.replace(batch, seq_lens=torch.tensor([40, most], dtype=torch.int32)))
    with pytest.raises(RunError, match=f"seq_lens reaches {most + 1} tokens but .* holds {most}: pass shorter"):
        longer = torch.tensor([40, most + 1], dtype=torch.int32)
        backend.init_forward_metadata(dataclasses.replace(batch, seq_lens=longer))


def test_parents_come_first() -> None:
    with pytest.raises(ValueError, match=r"parents\[0\]\[1\]=1"):
        tree_mask([[-1, 1]], [2])
    with pytest.raises(ValueError, match=r"seq_lens\[0\]=1 is out of range: pass at least 2"):
        tree_mask([[-1, 0]], [1])
    with pytest.raises(ValueError, match="parents has 1 requests and seq_lens 2"):
        tree_mask([[-1, 0]], [5, 6])


def test_fp8_pool_with_scales(device: str) -> None:
    """Writes divide by the scales, reads multiply by them."""
    layer = dataclasses.replace(PLAIN, k_scale=0.5, v_scale=0.25)
    past = Past.make(LENS, device, 16, 1, torch.float8_e4m3fn)
    backend = PagedAttention(past.table, past.pool, [layer], dtype_of(device))
    batch = past.batch(ForwardMode.DECODE, [1] * 4, LENS)
    past.fill(layer, [n - 1 for n in LENS])
    backend.init_forward_metadata(batch)
    q, found = run_layer(backend, past, layer, batch, [0] * 4)
    check(found, q, past, layer, batch, [0] * 4, LENS, atol=0.15)
    rounded = [
        [(x / s).to(torch.float8_e4m3fn).to(x.dtype) * s for x in of[0]] for of, s in ((past.k, 0.5), (past.v, 0.25))
    ]
    past.k, past.v = [rounded[0]], [rounded[1]]
    check(found, q, past, layer, batch, [0] * 4, LENS, atol=4e-3)


@pytest.mark.parametrize(
    ("layers", "told"),
    [
        ([dataclasses.replace(PLAIN, window_left=w) for w in (4, 8)], r"window_left is \[4, 8\]"),
        (
            [dataclasses.replace(PLAIN, window_left=4), dataclasses.replace(PLAIN, is_cross=True)],
            "window_left=4 with cross attention",
        ),
    ],
)
def test_parts_that_there_are_none_of(layers: list[AttentionLayer], told: str) -> None:
    table, pool = RequestTable(1, 16), TokenPool(2, 16, 1, KV_HEADS, DIM, torch.float32)
    with pytest.raises(CapabilityError, match=told):
        PagedAttention(table, pool, layers, torch.float32)


def test_cross_attention_needs_the_encoders_lengths() -> None:
    cross = dataclasses.replace(PLAIN, is_cross=True)
    past = Past.make([4], "cpu", 16, 1)
    backend = PagedAttention(past.table, past.pool, [cross], torch.float32)
    with pytest.raises(CapabilityError, match="encoder_lens=None"):
        backend.init_forward_metadata(past.batch(ForwardMode.DECODE, [1], [4]))
