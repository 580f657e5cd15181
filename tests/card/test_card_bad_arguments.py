"""Odd tensors and values on a card: each once broke the context or gave a wrong result. tests/api has the CPU's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashpage
from flashpage import RunError

pytestmark = pytest.mark.cuda
DEVICE = torch.device("cuda:0")
HEADS, KV_HEADS, DIM, PAGE = 4, 2, 64, 16


def views(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """[8, 4, 128] at addresses and strides that do not suit the merge kernel's loads of four elements."""
    wide = torch.randn(8, 4, 130, device=DEVICE).to(dtype)
    long = torch.randn(8 * 4 * 128 + 1, device=DEVICE).to(dtype)
    return {"inside": wide[..., 1:129], "step": wide[..., :128], "start": long[1:].view(8, 4, 128)}


@pytest.mark.parametrize("name", ["inside", "step", "start"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_merges_of_views_between_loads(dtype: torch.dtype, name: str) -> None:
    v, s = views(dtype)[name], torch.randn(8, 4, device=DEVICE)
    other, s_other = torch.randn(8, 4, 128, device=DEVICE).to(dtype), torch.randn(8, 4, device=DEVICE)
    expected = flashpage.merge_state(v.contiguous().clone(), s, other, s_other)
    for given in ((v, s, other, s_other), (other, s_other, v, s)):
        for found, wanted in zip(flashpage.merge_state(*given), expected, strict=True):
            torch.testing.assert_close(found, wanted)
    stacked = torch.stack([v, v], 1)
    odd = torch.cat([stacked, stacked[..., :2]], -1)[..., 1:129]
    both = torch.stack([s, s_other], 1)
    for found, wanted in zip(
        flashpage.merge_states(odd, both), flashpage.merge_states(odd.contiguous(), both), strict=True
    ):
        assert torch.equal(found, wanted)
    if name == "start":  # contiguous, so it may be written in place
        with pytest.raises(RunError, match="the output starts at"):
            flashpage.merge_state_in_place(v, s.clone(), other, s_other)
    torch.cuda.synchronize()


def planned(**options: Any) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """A decode wrapper of two requests, q and a cache, fp16."""
    wrapper = flashpage.BatchDecodeWithPagedKVCacheWrapper(torch.empty(32 << 20, dtype=torch.uint8, device=DEVICE))
    arrays = (torch.tensor(numbers, dtype=torch.int32) for numbers in ((0, 2, 3), (5, 2, 7), (3, 16)))
    wrapper.plan(*arrays, HEADS, KV_HEADS, DIM, PAGE, **options)
    q = torch.randn(2, HEADS, DIM, device=DEVICE).half()
    return wrapper, q, torch.randn(8, 2, PAGE, KV_HEADS, DIM, device=DEVICE).half()


def test_a_run_refuses_odd_tensors() -> None:
    wrapper, q, cache = planned()
    expected = wrapper.run(q, cache)
    freed = torch.cat([q.flatten()[:8], q.flatten()])[8:].view(q.shape)
    freed.untyped_storage().resize_(0)
    memory = torch.zeros(3, HEADS, DIM, device=DEVICE).half()
    for _ in range(2):
        for odd, says in (
            (torch._neg_view(q), "resolve_neg"),
            (freed, "resized to 0"),
            (q.clone().requires_grad_(), "no_grad"),
        ):
            with pytest.raises(RunError, match=says):
                wrapper.run(odd, cache)
        memory[:2].copy_(q)
        for out in (memory[1:], memory[:2]):
            with pytest.raises(RunError, match="out shares memory with q"):
                wrapper.run(memory[:2], cache, out=out)
        assert torch.equal(wrapper.run(q, cache), expected)
    out = torch.empty_like(q)
    before = out._version
    wrapper.run(q, cache, out=out)
    wrapper.run(q, cache, out=out)
    assert out._version >= before + 2 and torch.equal(out, expected)


@pytest.mark.parametrize("window", [2**30, 2**31 - 1])
def test_windows_near_the_end_of_int32(window: int) -> None:
    """More rows than tokens, so that rows come before the first token."""
    wrapper = flashpage.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(32 << 20, dtype=torch.uint8, device=DEVICE))
    wrapper.plan(torch.tensor([0, 20]), torch.tensor([0, 10]), HEADS, KV_HEADS, DIM, causal=True, q_data_type="float16")
    q, k, v = (torch.randn(n, h, DIM, device=DEVICE).half() for n, h in ((20, HEADS), (10, KV_HEADS), (10, KV_HEADS)))
    expected = wrapper.run(q, k, v)
    assert torch.equal(wrapper.run(q, k, v, window_left=window), expected)


def test_a_default_device_of_its_own() -> None:
    with torch.device(DEVICE):
        wrapper, q, cache = planned()
        found = wrapper.run(q, cache)
    wrapper, _, _ = planned()
    assert torch.equal(wrapper.run(q, cache), found)


def test_the_int_workspace_grows() -> None:
    """200,000 requests of one token, after runs of the smaller plan that may still be in flight."""
    wrapper, q, cache = planned()
    small = wrapper._int_workspace_buffer.numel()
    wrapper.run(q, cache)
    count = 200_000
    arrays = (torch.arange(count + 1).int(), torch.arange(count).int() % 8, torch.ones(count).int())
    wrapper.plan(*arrays, HEADS, KV_HEADS, DIM, PAGE)
    many = torch.randn(count, HEADS, DIM, device=DEVICE).half()
    out = wrapper.run(many, cache)
    assert wrapper._int_workspace_buffer.numel() > small
    first = cache[torch.arange(count, device=DEVICE) % 8, 1, 0]
    assert torch.equal(out, first.repeat_interleave(HEADS // KV_HEADS, 1)), "one token: its value"


def test_append_saturates_what_it_does_not_look_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """64-bit numbers are not truncated; FLASHPAGE_CHECK_INDICES=on reports them."""
    monkeypatch.setenv("FLASHPAGE_CHECK_INDICES", "on")
    cache = torch.zeros(8, 2, PAGE, KV_HEADS, DIM, device=DEVICE).half()
    k = torch.ones(1, KV_HEADS, DIM, device=DEVICE).half()
    numbers = [torch.tensor([n], device=DEVICE) for n in (0, 2**32)]
    places = (torch.tensor([0], device=DEVICE), torch.tensor([0, 1], device=DEVICE), torch.tensor([1], device=DEVICE))
    with pytest.raises(RunError, match="positions"):
        flashpage.append_paged_kv_cache(k, k, numbers[0], numbers[1], cache, *places)
    assert not cache.any()
