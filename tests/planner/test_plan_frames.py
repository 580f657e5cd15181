"""How many calls known options take: a plan at most five Python frames of the package and one foreign call, a run two
frames and one foreign call. (test_latent_frames.py is about latent rows.)"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from counted_calls import check, count, indptr, lengths, workspace

import flashpage
from flashpage.errors import PlanError
from flashpage.kernels import choose, cpu_attention
from flashpage.plan import mixed_batch
from flashpage.plan.report.mixed import PartedPlan

HEADS = (4, 2, 64, 16)
FP32 = {"q_data_type": torch.float32}
SLOPES = torch.linspace(-1, 0, 4)


def test_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = flashpage.BatchDecodeWithPagedKVCacheWrapper(workspace())
    steps = [[500, 3, 90], [501, 4, 91, 7]]
    arguments = [lengths(tokens) for tokens in steps]
    check(
        lambda: wrapper.plan(*arguments[0], *HEADS, q_data_type=torch.float32),
        lambda: wrapper.plan(*arguments[1], *HEADS, q_data_type=torch.float32),
        monkeypatch,
    )
    assert wrapper._planner.total_q == 4


@pytest.mark.parametrize("options", [{"window_left": 20}, {"chunk": 64}, {"pos_encoding_mode": "ALIBI"}], ids=str)
def test_decode_with_options(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = flashpage.BatchDecodeWithPagedKVCacheWrapper(workspace())
    first, again = lengths([500, 3, 90]), lengths([501, 4, 91])
    check(
        lambda: wrapper.plan(*first, *HEADS, **FP32, **options),
        lambda: wrapper.plan(*again, *HEADS, **FP32, **options),
        monkeypatch,
    )
    check(
        lambda: flashpage.decode.fast_decode_plan(wrapper, *first, *HEADS, **FP32),
        lambda: flashpage.decode.fast_decode_plan(wrapper, *again, *HEADS, **FP32),
        monkeypatch,
    )


def add_slopes(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + SLOPES[h] * (kv_idx - q_idx)


VARIANTS = {
    "functions": lambda: flashpage.Variant(add_slopes, lambda b, h, q_idx, kv_idx: kv_idx <= q_idx),
    "expressions": lambda: flashpage.Variant(
        logit="score * s + t[h]", mask="kv_idx != 3", tensors={"t": SLOPES}, scalars={"s": 2.0}
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their captures are compared without frames, and the variant is shared by both wrappers."""
    options = {**FP32, "variant": VARIANTS[name]()}
    decode = flashpage.BatchDecodeWithPagedKVCacheWrapper(workspace())
    prefill = flashpage.BatchPrefillWithPagedKVCacheWrapper(workspace())
    for wrapper, rows in ((decode, ()), (prefill, (indptr([1, 5, 2]),))):
        first, again = lengths([500, 3, 90]), lengths([501, 4, 91])
        check(
            lambda w=wrapper, r=rows, a=first: w.plan(*r, *a, *HEADS, **options),
            lambda w=wrapper, r=rows, a=again: w.plan(*r, *a, *HEADS, **options),
            monkeypatch,
        )


def test_a_variant_that_changes_is_traced_by_every_wrapper() -> None:
    """A wrapper sees the change although another one has traced it before."""
    variant = flashpage.Variant(logit="score + t[h]", tensors={"t": SLOPES})
    wrappers = [flashpage.BatchDecodeWithPagedKVCacheWrapper(workspace()) for _ in range(2)]
    for kind in ("float32", "float16"):
        variant.tensors["t"] = SLOPES.to(getattr(torch, kind))
        for wrapper in wrappers:
            wrapper.plan(*lengths([500, 3]), *HEADS, **FP32, variant=variant)
            assert wrapper._planner.active[0].prepared.choice.spec.variant.tensors == (("t", kind, 1),)


def test_int64_page_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """C converts them; one that 31 bits do not hold is refused."""
    wrapper = flashpage.BatchDecodeWithPagedKVCacheWrapper(workspace())
    kv, pages, last = lengths([500, 3, 90])

    def plan(numbers: torch.Tensor) -> None:
        wrapper.plan(kv, numbers, last, *HEADS, **FP32)

    check(lambda: plan(pages.long()), lambda: plan(pages.long() + 5), monkeypatch)
    planner = wrapper._planner
    assert planner.indices.max_page == len(pages) + 4 and torch.equal(wrapper._paged_kv_indices_buf, pages + 5)
    for wrong in (2**31, 2**32 + 3, -1):
        with pytest.raises(PlanError, match=rf"indices\[2\]={wrong} is no page number"):
            plan(torch.where(pages == 2, wrong, pages.long()))
        with pytest.raises(flashpage.RunError, match="no plan"):
            wrapper.run(torch.randn(3, 4, 64), torch.randn(50, 2, 16, 2, 64))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("is_in_the_buffer", [False, True])
def test_decode_of_a_graph(is_in_the_buffer: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Page numbers are copied to the buffer by the call, if they are not there already, and after all that can fail."""
    buffers = [torch.zeros(size, dtype=torch.int32) for size in (4, 100, 3)]
    wrapper = flashpage.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(), *buffers)
    first, again = lengths([500, 3, 90]), lengths([501, 4, 91])

    def plan(indptr: torch.Tensor, pages: torch.Tensor, last: torch.Tensor) -> None:
        if is_in_the_buffer:
            buffers[1][: len(pages)] = pages
        wrapper.plan(indptr, buffers[1] if is_in_the_buffer else pages.to(dtype), last, *HEADS, **FP32)

    check(lambda: plan(*first), lambda: plan(again[0], again[1] + 7, again[2]), monkeypatch)
    assert torch.equal(buffers[1][: len(again[1])], again[1] + 7)
    assert wrapper._planner.indices.max_page == len(again[1]) + 6
    wrong = [again[0], again[1] + 20, again[2] + 16]
    before = buffers[1].clone()
    with pytest.raises(PlanError, match="last_page_len"):
        wrapper.plan(*wrong, *HEADS, **FP32)
    assert torch.equal(buffers[1], before)
    with pytest.raises(PlanError, match="has 2 requests but the wrapper's graph buffers fix it at 3"):
        wrapper.plan(*lengths([5, 6]), *HEADS, **FP32)
    with pytest.raises(PlanError, match="indices buffer holds 100"):
        wrapper.plan(*lengths([5, 6, 2000]), *HEADS, **FP32)


def prefill_arguments(rows: list[int], tokens: list[int]) -> tuple[torch.Tensor, ...]:
    return indptr(rows), *lengths(tokens)


def test_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = flashpage.BatchPrefillWithPagedKVCacheWrapper(workspace())
    options = {"causal": True, "q_data_type": torch.float32}
    first, again = prefill_arguments([100, 120], [500, 120]), prefill_arguments([101, 90, 127], [400, 90, 800])
    check(lambda: wrapper.plan(*first, *HEADS, **options), lambda: wrapper.plan(*again, *HEADS, **options), monkeypatch)
    assert wrapper._planner.total_q == 101 + 90 + 127


def test_ragged_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = flashpage.BatchPrefillWithRaggedKVCacheWrapper(workspace())

    def plan(rows: list[int], tokens: list[int]) -> None:
        wrapper.plan(indptr(rows), indptr(tokens), 4, 2, 64, causal=True, **FP32)

    check(lambda: plan([5, 60], [50, 60]), lambda: plan([6, 60], [51, 60]), monkeypatch)


def test_batch_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = flashpage.BatchAttention(device="cpu")

    def plan(tokens: list[int]) -> None:
        kv, pages, _ = lengths(tokens)
        wrapper.plan(indptr([1, 1]), kv, pages, torch.tensor(tokens), 4, 2, 64, 64, 16, **FP32, kv_data_type="float32")

    check(lambda: plan([500, 3]), lambda: plan([501, 4]), monkeypatch)


def test_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every class runs so with tensors like the last run's."""
    kv, pages, last = lengths([40, 5])
    q, cache, rows = torch.randn(2, 4, 64), torch.randn(8, 2, 16, 2, 64), indptr([1, 1])
    decode = flashpage.BatchDecodeWithPagedKVCacheWrapper(workspace())
    decode.plan(kv, pages, last, *HEADS, **FP32)
    paged = flashpage.BatchPrefillWithPagedKVCacheWrapper(workspace())
    paged.plan(rows, kv, pages, last, *HEADS, **FP32)
    both = flashpage.BatchAttention(device="cpu")
    both.plan(rows, kv, pages, torch.tensor([40, 5]), 4, 2, 64, 64, 16, **FP32, kv_data_type="float32")
    ragged = flashpage.BatchPrefillWithRaggedKVCacheWrapper(workspace())
    ragged.plan(rows, rows, 4, 2, 64, **FP32)
    k = torch.randn(2, 2, 64)
    for run in (lambda w=w: w.run(q, cache) for w in (decode, paged, both)):
        run()
        frames, foreign = count(run, monkeypatch)
        assert foreign == ["fp_py_run"] and len(frames) == 2, frames
    ragged.run(q, k, k)
    frames, foreign = count(lambda: ragged.run(q, k, k), monkeypatch)
    assert foreign == ["fp_py_run"] and len(frames) == 2, frames


def test_runs_with_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers with fp8 caches pass the scales of K and V alone, as equal numbers in every layer."""
    kv, pages, last = lengths([40, 5])
    decode = flashpage.BatchDecodeWithPagedKVCacheWrapper(workspace())
    decode.plan(kv, pages, last, *HEADS, **FP32)
    q, cache = torch.randn(2, 4, 64), torch.randn(8, 2, 16, 2, 64)
    decode.run(q, cache, k_scale=0.5, v_scale=0.25)
    _, foreign = count(lambda: decode.run(q, cache, k_scale=0.5, v_scale=0.25), monkeypatch)
    assert foreign == ["fp_py_run"]
    found, expected = decode.run(q, cache, v_scale=0.25), 0.25 * decode.run(q, cache)
    torch.testing.assert_close(found, expected)


def divide_mixed_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives requests with few rows a kernel of their own."""
    many = dataclasses.replace(cpu_attention.KERNEL, runs_beside=True)
    monkeypatch.setattr(choose, "ATTENTION", [dataclasses.replace(many, most_packed_rows=64), many])
    monkeypatch.setattr(mixed_batch, "LEAST_GAIN_NS", -1e12)


def test_mixed_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    divide_mixed_batches(monkeypatch)
    wrapper = flashpage.BatchPrefillWithPagedKVCacheWrapper(workspace())
    options = {"causal": True, "q_data_type": torch.float32}
    first = prefill_arguments([1, 300, 1], [900, 300, 2000])
    again = prefill_arguments([1, 1, 301], [901, 2001, 301])
    check(lambda: wrapper.plan(*first, *HEADS, **options), lambda: wrapper.plan(*again, *HEADS, **options), monkeypatch)
    assert isinstance(wrapper.last_plan, PartedPlan)


def test_a_mixed_batch_that_one_call_divides_has_a_side_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that was not worth two plans chose the kernels; on a card, runs of two parts without a side stream end
    the process."""
    divide_mixed_batches(monkeypatch)
    monkeypatch.setattr(mixed_batch.Fork, "handle", 4711)
    wrapper = flashpage.BatchPrefillWithPagedKVCacheWrapper(workspace())
    shorter, longer = (prefill_arguments([1, 300, 1], tokens) for tokens in ([900, 300, 2000], [4000, 300, 9000]))
    gains = []
    for arguments in (shorter, longer):
        divided = flashpage.BatchPrefillWithPagedKVCacheWrapper(workspace())
        divided.plan(*arguments, *HEADS, causal=True, **FP32)
        struct = divided._planner.active[0]._parts._struct
        gains.append(struct.whole_ns * (1.0 - mixed_batch.LEAST_GAIN_SHARE) - struct.parts_ns)
    monkeypatch.setattr(mixed_batch, "LEAST_GAIN_NS", sum(gains) / 2)
    wrapper = flashpage.BatchPrefillWithPagedKVCacheWrapper(workspace())
    wrapper.plan(*shorter, *HEADS, causal=True, **FP32)
    plan = wrapper._planner.active[0]
    assert not plan.call.made_parts
    _, foreign = count(lambda: wrapper.plan(*longer, *HEADS, causal=True, **FP32), monkeypatch)
    assert foreign == ["fp_py_plan"] and plan.call.made_parts and plan.fork == 4711


def test_cascade_level(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts the levels' own plans, without the cascade's work around them."""
    wrapper = flashpage.MultiLevelCascadeAttentionWrapper(2, workspace())

    def plan(own: list[int]) -> None:
        (shared, shared_pages, shared_last), (kv, pages, last) = lengths([640]), lengths(own)
        rows = [indptr([len(own)]), indptr([1] * len(own))]
        wrapper.plan(rows, [shared, kv], [shared_pages, pages], [shared_last, last], *HEADS, q_data_type=torch.float32)

    plan([17, 40, 3])
    frames, foreign = count(lambda: plan([18, 41, 4]), monkeypatch)
    assert foreign == ["fp_py_plan"] * 2
    assert frames.count("session.py:plan") == frames.count("option_plan.py:plan") == 2
    begin = frames.index("session.py:plan")
    assert frames[begin : begin + 2] == ["session.py:plan", "option_plan.py:plan"]


def test_other_kernels_take_one_call_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that needs other kernels than the last plan is noticed."""
    wrapper = flashpage.BatchPrefillWithPagedKVCacheWrapper(workspace())
    few, many = prefill_arguments([1, 2], [500, 120]), prefill_arguments([100, 120], [500, 120])
    wrapper.plan(*few, *HEADS, q_data_type=torch.float32)
    rows = wrapper._planner.active[0].prepared.problem.packed_rows
    _, foreign = count(lambda: wrapper.plan(*many, *HEADS, q_data_type=torch.float32), monkeypatch)
    assert foreign[0] == "fp_py_plan" and foreign.count("fp_plan_batch") == 2
    assert wrapper._planner.active[0].prepared.problem.packed_rows > rows
