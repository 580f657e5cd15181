"""Builtins of the host library that take tensors: which ones they tell apart, their use, and the fallback."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from api_batch import DIM, HEADS, KV_HEADS, PAGE, Batch

import flashpage
from flashpage import native
from flashpage.native import fastcall

NEEDS_DLPACK = pytest.mark.skipif(
    not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="this torch has no DLPack functions"
)


@pytest.fixture(scope="module")
def batch() -> Batch:
    return Batch()


def planned(batch: Batch) -> Any:
    workspace = torch.empty(1 << 20, dtype=torch.uint8)
    wrapper = flashpage.BatchDecodeWithPagedKVCacheWrapper(workspace)
    wrapper.plan(*batch.pages(), HEADS, KV_HEADS, DIM, PAGE, q_data_type=torch.float32)
    return wrapper


class Bound:
    """Structs bound to tensors, for a run without work."""

    def __init__(self, dtype: torch.dtype, has_pair: bool = False) -> None:
        self.q, self.out = torch.zeros(4, 2, 16).to(dtype), torch.zeros(4, 2, 16).to(dtype)
        self.k = torch.zeros(3, 2, 4, 2, 16).to(dtype)
        self.v = torch.zeros(3, 2, 4, 2, 16).to(dtype) if has_pair else None
        self.lse = torch.zeros(4, 2)
        self.params, self.merge, self.args = native.AttentionParams(), native.MergeParams(), native.RunArgs()
        structs = [self.params, self.merge, self.params]  # q is the first field of params
        structs += [getattr(self.params, name) for name in ("k", "v", "key_scales", "value_scales")]
        self.struct = native.BoundRun(ctypes.addressof(self.args), num_parts=1, v_offset=64)
        self.struct.alignment_masks[:] = [15, 15, 15, 15]
        self.struct.parts[0] = native.BoundPart(*map(ctypes.addressof, structs))
        assert fastcall.builtins().bind(ctypes.addressof(self.struct), *self.tensors()) == native.OK

    def tensors(self) -> list[Any]:
        return [self.q, self.k, self.v, self.out, self.lse]

    def run(self, tensors: list[Any]) -> int:
        return fastcall.builtins().run(ctypes.addressof(self.struct), *tensors, 77)


@NEEDS_DLPACK
@pytest.mark.parametrize("has_pair", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_structs_point_at_tensors_of_the_same_form(dtype: torch.dtype, has_pair: bool) -> None:
    bound = Bound(dtype, has_pair)
    tensors = [None if t is None else t.clone() for t in bound.tensors()]
    assert bound.run(tensors) == native.OK
    q, k, v, out, lse = tensors
    params, merge = bound.params, bound.merge
    assert (params.q, params.k.data, params.out, params.lse) == tuple(t.data_ptr() for t in (q, k, out, lse))
    assert params.v.data == (k.data_ptr() + 64 if v is None else v.data_ptr())
    assert bound.args.stream == 77
    assert (merge.out, merge.lse) == (out.data_ptr(), lse.data_ptr())
    assert bound.run([*tensors[:4], None]) == native.OK
    assert params.lse is None and merge.lse is None


OTHERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a row less": lambda t: t[1:],
    "other strides": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "a dimension more": lambda t: t[None],
    "six dimensions": lambda t: t[(None,) * (6 - t.dim())],
    "another type of the same size": lambda t: t.view(torch.float16 if t.element_size() == 2 else torch.int32),
    "another device": lambda t: t.to("meta"),
    "no tensor": lambda t: t.tolist(),
    "an array": lambda t: t.new_zeros(t.shape, dtype=torch.float32).numpy(),
    "off its alignment": lambda t: torch.empty(t.numel() + 1, dtype=t.dtype)[1:].view(t.shape),
}


@NEEDS_DLPACK
@pytest.mark.parametrize("which", range(5))
@pytest.mark.parametrize("other", OTHERS)
def test_other_tensors_are_told_apart(which: int, other: str) -> None:
    if other == "off its alignment" and which == 4:
        pytest.skip("LSE needs no more than a float's")
    bound = Bound(torch.bfloat16, has_pair=True)
    tensors = bound.tensors()
    tensors[which] = OTHERS[other](tensors[which])
    before = bytes(bound.params)
    assert bound.run(tensors) == native.OTHER_TENSORS
    assert bytes(bound.params) == before


@NEEDS_DLPACK
def test_one_cache_is_no_pair() -> None:
    pair, one = Bound(torch.float16, has_pair=True), Bound(torch.float16)
    assert pair.run([pair.q, pair.k, None, pair.out, None]) == native.OTHER_TENSORS
    assert one.run([one.q, one.k, one.k, one.out, None]) == native.OTHER_TENSORS


@NEEDS_DLPACK
def test_no_reference_is_kept() -> None:
    bound = Bound(torch.float16)
    tensors = bound.tensors()
    before = [sys.getrefcount(t) for t in (*tensors[:2], *tensors[3:])]
    for _ in range(10):
        assert bound.run(tensors) == native.OK
        assert bound.run([tensors[0], 3, None, None, None]) == native.OTHER_TENSORS
    assert [sys.getrefcount(t) for t in (*tensors[:2], *tensors[3:])] == before


@NEEDS_DLPACK
@pytest.mark.parametrize("return_lse", [False, True])
def test_a_second_run_is_one_call(batch: Batch, return_lse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = planned(batch)
    first = wrapper.run(batch.q_decode, batch.cache, return_lse=return_lse)
    monkeypatch.setattr(wrapper._attention, "_run_judged", None)
    second = wrapper.run(batch.q_decode.clone(), batch.cache.clone(), return_lse=return_lse)
    torch.testing.assert_close(second, first, rtol=0, atol=0, equal_nan=True)


def test_without_dlpack_results_are_the_same(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = planned(batch).run(batch.q_decode, batch.cache)
    monkeypatch.setattr(torch.Tensor, "__dlpack_c_exchange_api__", None, raising=False)
    fastcall.builtins.cache_clear()
    try:
        wrapper = planned(batch)
        assert wrapper._attention._run_tensors() == native.OTHER_TENSORS
        for _ in range(2):
            assert torch.equal(wrapper.run(batch.q_decode, batch.cache), expected)
    finally:
        monkeypatch.undo()
        fastcall.builtins.cache_clear()


@NEEDS_DLPACK
def test_page_numbers_are_taken_where_kernels_can_read_them() -> None:
    """Page numbers that the library cannot read in place are read, copied or refused by Python."""
    numbers = torch.arange(10, dtype=torch.int32)
    batch = native.BatchStruct(is_paged=1, device_type=1, q_len_per_request=1, bytes_of_a_copy=64)
    copies, page_copies = torch.empty(256, dtype=torch.uint8), torch.empty(10, dtype=torch.int32)
    batch.copies = copies.data_ptr()
    batch.page_copies, batch.most_page_copies = page_copies.data_ptr(), 10
    batch.most_total_rows = batch.most_entries = 2**40
    batch.most_requests = 100
    call = native.PlanCall(batch=ctypes.addressof(batch), row_class=native.RowClass(0, -1))

    def status_of(indices: Any, entries: int = 10) -> int:
        batch.page_numbers = None
        kv_indptr = torch.tensor([0, entries], dtype=torch.int32)
        lengths = (None, kv_indptr, None, None)
        return fastcall.builtins().plan(ctypes.addressof(call), 0, *lengths, indices)

    def is_taken(indices: torch.Tensor, entries: int) -> bool:
        is_there = status_of(indices, entries) == native.OTHER_BATCH and batch.page_numbers == page_copies.data_ptr()
        return is_there and torch.equal(page_copies[:entries], indices[:entries])

    assert is_taken(numbers, 10) and batch.max_page == 9
    assert is_taken(numbers[3:], 7) and is_taken(numbers, 4) and batch.max_page == 3
    assert is_taken(numbers.long() + 2**31 - 10, 10) and batch.max_page == 2**31 - 1
    too_large = numbers.long() + 2**31 - 9
    others = [numbers[::2], numbers.short(), numbers.float(), numbers.view(2, 5), 5, -numbers, -numbers.long()]
    assert [status_of(other, 2) for other in others] == [native.OTHER_PAGES] * 7
    assert status_of(too_large) == native.OTHER_PAGES and status_of(too_large, 9) == native.OTHER_BATCH
    assert status_of(numbers.long() + 2**32) == native.OTHER_PAGES
    assert status_of(numbers, 11) == native.OTHER_PAGES
    assert status_of(None) == native.OTHER_PAGES
    batch.most_page_copies = 9
    assert status_of(numbers) == native.OTHER_PAGES
    batch.most_page_copies = 10
    batch.page_buffer, batch.page_buffer_entries = numbers.data_ptr(), 9  # captured launches read this address only
    assert is_taken(numbers, 10) and status_of(numbers.clone()) == native.OTHER_PAGES
    for elsewhere in (numbers.clone(), numbers.long()):
        assert status_of(elsewhere, 9) == native.OTHER_BATCH and batch.page_numbers == page_copies.data_ptr()
    batch.device_type = 2
    assert status_of(numbers.clone(), 9) == native.OTHER_PAGES  # a card's buffer takes them through slots
    batch.page_buffer = None
    assert status_of(numbers) == status_of(numbers.long()) == native.OTHER_PAGES
    batch.device_type, batch.checks_pages = 1, 1
    assert status_of(numbers) == native.OTHER_PAGES
