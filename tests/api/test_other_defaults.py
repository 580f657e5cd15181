"""The public API under another default device and default dtype, and inside inference mode: the library names the
device and dtype of every tensor that it makes."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from wrong_arguments import DIM, HEADS, KV_HEADS, PAGE, PAGES, decode_plan, prefill_plan, ragged_plan

import flashpage

F32 = torch.float32
SIZES = (HEADS, KV_HEADS, DIM, PAGE)


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=F32, device="cpu")


def ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device="cpu")


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.bool, device="cpu")


def workspace() -> torch.Tensor:
    return torch.empty(4 << 20, dtype=torch.uint8, device="cpu")


# Made once, during collection, under the usual defaults.
CACHE, Q5, Q2, K30, V30 = (
    rand(PAGES, 2, PAGE, KV_HEADS, DIM),
    rand(5, HEADS, DIM),
    rand(2, HEADS, DIM),
    *rand(2, 30, 2, DIM),
)
DECODE, PREFILL, RAGGED = decode_plan(), prefill_plan(), ragged_plan()
BYTES = [workspace() for _ in range(3)]
MASK86 = torch.rand(86, dtype=F32) < 0.7
BLOCK_TABLES, SEQ_LENS = ints(5, 2, 7, 0).view(2, 2), ints(19, 16)


def decode(plan: dict[str, Any], **made: Any) -> Any:
    wrapper = flashpage.BatchDecodeWithPagedKVCacheWrapper(BYTES[0], **made)
    wrapper.plan(**(DECODE | plan))
    return wrapper.run(Q2, CACHE, return_lse=True)


def prefill(plan: dict[str, Any], **made: Any) -> Any:
    wrapper = flashpage.BatchPrefillWithPagedKVCacheWrapper(BYTES[0], **made)
    wrapper.plan(**(PREFILL | plan))
    wrapper.last_plan.explain()
    return wrapper.run(Q5, CACHE, return_lse=True)


def ragged(plan: dict[str, Any], **made: Any) -> Any:
    wrapper = flashpage.BatchPrefillWithRaggedKVCacheWrapper(BYTES[0], **made)
    wrapper.plan(**(RAGGED | plan))
    return wrapper.run(Q5, K30, V30, return_lse=True)


def on_device() -> Any:
    wrapper = flashpage.BatchDecodeWithPagedKVCacheWrapper(BYTES[0])
    wrapper.plan_on_device(SEQ_LENS, BLOCK_TABLES, *SIZES, q_data_type=F32)
    return wrapper.run(Q2, CACHE)


def cascade(window: int) -> Any:
    wrapper = flashpage.MultiLevelCascadeAttentionWrapper(2, BYTES[0])
    levels = ([INTS[0], INTS[1]], [INTS[2], INTS[3]], [INTS[4], INTS[5]], [INTS[6], INTS[7]])
    wrapper.plan(*levels, *SIZES, causal=True, window_left=window, q_data_type=F32)
    return wrapper.run(Q5, CACHE, return_lse=True)


INTS = [
    ints(*numbers) for numbers in ((0, 5), (0, 2, 5), (0, 2), (0, 1, 2), (0, 1), (2, 3), (16,), (9, 16), (0, 3), (2, 5))
]


def shared_prefix() -> Any:
    first = flashpage.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(BYTES[0])
    first.begin_forward(INTS[3], INTS[5], INTS[7], *SIZES, data_type=F32)
    second = flashpage.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(BYTES[0])
    second.begin_forward(INTS[1], INTS[3], INTS[5], INTS[7], *SIZES)
    return first.forward(Q2, K30, V30, CACHE), second.forward(Q5, K30, V30, CACHE, causal=True)


def pod() -> Any:
    first = flashpage.PODWithPagedKVCacheWrapper(BYTES[0])
    first.plan(DECODE["indptr"], DECODE["indices"], DECODE["last_page_len"], *SIZES, q_data_type=F32)
    second = flashpage.BatchPODWithPagedKVCacheWrapper(BYTES[0])
    lengths = (INTS[1], INTS[3], INTS[5], INTS[7])
    second.plan(*lengths, INTS[3], INTS[3], INTS[5], INTS[7], *SIZES, q_data_type=F32)
    return *first.run(Q5, K30, V30, Q2, CACHE, causal_p=True), *second.run(Q5, CACHE, Q2, CACHE)


def batch_attention() -> Any:
    wrapper = flashpage.BatchAttention(device="cpu")
    sizes = (HEADS, KV_HEADS, DIM, DIM, PAGE)
    wrapper.plan(INTS[1], INTS[3], INTS[5], INTS[7], *sizes, q_data_type=F32, kv_data_type=F32)
    return wrapper.run(Q5, CACHE)


def sparse() -> Any:
    first = flashpage.BlockSparseAttentionWrapper(BYTES[0])
    first.plan(INTS[2], INTS[3][:2], 5, 30, 5, 10, HEADS, KV_HEADS, DIM, mask=BLOCKS[0], q_data_type=F32)
    second = flashpage.VariableBlockSparseAttentionWrapper(BYTES[0])
    second.plan(BLOCKS[1], BLOCKS[2], BLOCKS[3], HEADS, KV_HEADS, DIM, q_data_type=F32)
    return first.run(Q5, K30, V30), second.run(Q5.transpose(0, 1), K30.transpose(0, 1), V30.transpose(0, 1))


BLOCKS = [ones(2, 5, 10), ones(2, 2, 2), ints(2, 3, 2, 3).view(2, 2), ints(10, 20, 10, 20).view(2, 2)]


def single() -> Any:
    mask = MASK86[:60].view(2, 30)
    return (
        flashpage.single_decode_with_kv_cache(Q2[0], K30, V30),
        flashpage.single_prefill_with_kv_cache(Q5, K30, V30, causal=True, pos_encoding_mode="ALIBI"),
        flashpage.single_prefill_with_kv_cache(Q2, K30, V30, custom_mask=mask),
    )


def append() -> Any:
    cache = CACHE.clone()
    request, positions = flashpage.get_batch_indices_positions(INTS[3], INTS[7], 2)
    places = (request, positions, cache, INTS[5], INTS[3], INTS[7])
    flashpage.append_paged_kv_cache(K30[:2], V30[:2], *places)
    return cache, request, positions, flashpage.get_seq_lens(INTS[3], INTS[7], PAGE)


def merges() -> Any:
    s = Q5[..., 0].contiguous()
    states = torch.stack([Q5, -Q5], 1), torch.stack([s, -s], 1)
    return *flashpage.merge_state(Q5, s, -Q5, s), *flashpage.merge_states(*states)


def packing() -> Any:
    return flashpage.packbits(MASK86), *flashpage.segment_packbits(MASK86, INTS[8][:1].new_tensor([0, 40, 86]))


def small_things() -> Any:
    return flashpage.utils.get_alibi_slopes(6)


CALLS: dict[str, Callable[[], Any]] = {
    "decode": lambda: decode({}),
    "decode, tables": lambda: decode({"indices": None, "block_tables": BLOCK_TABLES}),
    "decode, graph": lambda: decode({}, use_cuda_graph=True, max_batch=4, max_pages=9),
    "decode, soft cap": lambda: decode({"logits_soft_cap": 3.0, "window_left": 7}),
    "prefill": lambda: prefill({"causal": True}),
    "prefill, RoPE": lambda: prefill({"pos_encoding_mode": "ROPE_LLAMA"}),
    "prefill, ALiBi": lambda: prefill({"pos_encoding_mode": "ALIBI"}),
    "prefill, mask": lambda: prefill({"custom_mask": MASK86}),
    "prefill, chunk": lambda: prefill({"chunk": 8, "causal": True}),
    "prefill, graph": lambda: prefill({}, use_cuda_graph=True, max_batch=4, max_pages=9, max_rows=9),
    "ragged": lambda: ragged({"causal": True}),
    "on the device": on_device,
    "cascade": lambda: cascade(-1),
    "cascade, window": lambda: cascade(9),
    "shared prefix": shared_prefix,
    "POD": pod,
    "BatchAttention": batch_attention,
    "sparse": sparse,
    "single": single,
    "append": append,
    "merges": merges,
    "packing": packing,
    "utils": small_things,
}


@contextlib.contextmanager
def default_device() -> Iterator[None]:
    with torch.device("meta"):
        yield


@contextlib.contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(F32)


WAYS: dict[str, Callable[[], Any]] = {
    "device": default_device,
    "dtype": default_dtype,
    "inference": torch.inference_mode,
}


def flat(found: Any) -> list[torch.Tensor]:
    return [found] if isinstance(found, torch.Tensor) else [t for part in found for t in flat(part)]


@pytest.mark.parametrize(("way", "name"), [*itertools.product(WAYS, CALLS)])
def test_results_are_the_same(way: str, name: str) -> None:
    expected = flat(CALLS[name]())
    with WAYS[way]():
        found = flat(CALLS[name]())
    for ours, usual in zip(found, expected, strict=True):
        assert ours.device == usual.device and ours.dtype == usual.dtype
        assert torch.equal(ours.nan_to_num(), usual.nan_to_num())


@pytest.mark.parametrize("given", [{}, {"use_cuda_graph": True, "max_batch": 4, "max_pages": 9}])
def test_a_wrapper_of_inference_mode_is_planned_outside(given: dict[str, Any]) -> None:
    """The reverse order."""
    with torch.inference_mode():
        inside = flashpage.BatchDecodeWithPagedKVCacheWrapper(BYTES[1], **given)
        inside.plan(**DECODE)
    outside = flashpage.BatchDecodeWithPagedKVCacheWrapper(BYTES[2], **given)
    outside.plan(**DECODE)
    longs = DECODE | {"indices": DECODE["indices"].long(), "indptr": DECODE["indptr"].long()}
    inside.plan(**longs)
    with torch.inference_mode():
        outside.plan(**longs)
        assert torch.equal(inside.run(Q2, CACHE), outside.run(Q2, CACHE))
    assert torch.equal(inside.run(Q2, CACHE), outside.run(Q2, CACHE))
