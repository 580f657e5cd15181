"""Behaviour that engines rely on: run-time options override planned ones, attributes, index tensors of plan."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from api_batch import DIM, HEADS, KV_HEADS, KV_LENS, PAGE, ROWS, Batch, attention, indptr_of

import flashpage
from flashpage.errors import CapabilityError
from flashpage.kernels.options import SPLIT_NEVER, check_window

pytestmark = pytest.mark.usefixtures("quick_kernels")


@pytest.fixture(scope="module")
def batch() -> Batch:
    return Batch()


def workspace() -> torch.Tensor:
    return torch.empty(4 << 20, dtype=torch.uint8)


def prefill(batch: Batch, **options: Any) -> flashpage.BatchPrefillWithPagedKVCacheWrapper:
    wrapper = flashpage.BatchPrefillWithPagedKVCacheWrapper(workspace())
    plan_prefill(wrapper, batch, **options)
    return wrapper


def plan_prefill(wrapper: Any, batch: Batch, **options: Any) -> None:
    heads = (HEADS, KV_HEADS, DIM, PAGE)
    wrapper.plan(batch.qo_indptr, *batch.pages(), *heads, q_data_type=torch.float32, **options)


def decode(batch: Batch, **options: Any) -> flashpage.BatchDecodeWithPagedKVCacheWrapper:
    wrapper = flashpage.BatchDecodeWithPagedKVCacheWrapper(workspace())
    wrapper.plan(*batch.pages(), HEADS, KV_HEADS, DIM, PAGE, q_data_type=torch.float32, **options)
    return wrapper


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- run-time options win


VARIATIONS = [
    {"causal": True},
    {"window_left": 3},
    {"causal": True, "window_left": 2, "logits_soft_cap": 5.0},
    {"logits_soft_cap": 2.0, "sm_scale": 0.3},
    {"sm_scale": 1.0},
    {},
]


@pytest.mark.parametrize("planned", VARIATIONS, ids=str)
def test_forward_wins_over_plan(batch: Batch, planned: dict[str, Any]) -> None:
    wrapper = prefill(batch, **planned)
    for given in VARIATIONS:
        options = {("soft_cap" if name == "logits_soft_cap" else name): value for name, value in given.items()}
        expected = batch.expected(batch.q, **options)
        close(wrapper.forward(batch.q, batch.cache, **given), expected)
        out, lse = wrapper.forward_return_lse(batch.q, batch.cache, **given)
        close(out, expected)
        assert lse.shape == batch.q.shape[:2]


def test_run_time_variations_are_planned_again(batch: Batch) -> None:
    """The caller may reuse a plan's tensors at once; options seen before are ready after every later plan."""
    wrapper = flashpage.BatchPrefillWithPagedKVCacheWrapper(workspace())
    lengths = [batch.qo_indptr.clone(), batch.indptr.clone(), batch.indices, batch.last_page_len.clone()]
    wrapper.plan(*lengths, HEADS, KV_HEADS, DIM, PAGE, q_data_type=torch.float32)
    for tensor in (lengths[0], lengths[1], lengths[3]):
        tensor.fill_(77)
    close(wrapper.forward(batch.q, batch.cache, causal=True), batch.expected(batch.q, causal=True))
    assert len(wrapper._planner.active) == 2
    plan_prefill(wrapper, batch)
    generations = {option_plan.generation for option_plan in wrapper._planner.active}
    assert generations == {wrapper._planner.generation}
    close(wrapper.run(batch.q, batch.cache), batch.expected(batch.q))


def test_window_at_run(batch: Batch) -> None:
    wrapper = decode(batch, window_left=3)
    close(wrapper.run(batch.q_decode, batch.cache), batch.expected(batch.q_decode, window_left=3))
    close(wrapper.run(batch.q_decode, batch.cache, window_left=7), batch.expected(batch.q_decode, window_left=7))
    close(wrapper.run(batch.q_decode, batch.cache, window_left=-1), batch.expected(batch.q_decode))
    close(wrapper.run(batch.q_decode, batch.cache), batch.expected(batch.q_decode, window_left=3))


@pytest.mark.parametrize(
    ("given", "checked"), [(-(2**31), -1), (-1, -1), (0, 0), (2**30 - 1, 2**30 - 1), (2**30, -1), (2**31 - 1, -1)]
)
def test_a_window_that_no_context_fills_is_none(given: int, checked: int) -> None:
    """Kernels subtract the window from positions in 32 bits, which are negative for rows before the first token."""
    assert check_window(given) == checked


def test_fewer_heads_than_planned(batch: Batch) -> None:
    """Engines plan with the largest head counts of all layers."""
    wrapper = flashpage.BatchPrefillWithPagedKVCacheWrapper(workspace())
    heads = (2 * HEADS, 2 * KV_HEADS, DIM, PAGE)
    wrapper.plan(batch.qo_indptr, *batch.pages(), *heads, causal=True, q_data_type=torch.float32)
    close(wrapper.run(batch.q, batch.cache), batch.expected(batch.q, causal=True))


def test_custom_mask_replaces_causal(batch: Batch) -> None:
    masks = [torch.rand(q, k) < 0.6 for q, k in zip(ROWS, KV_LENS, strict=True)]
    flat = torch.cat([mask.flatten() for mask in masks])
    bits = indptr_of(tuple(q * k for q, k in zip(ROWS, KV_LENS, strict=True)))
    packed, byte_indptr = flashpage.segment_packbits(flat, bits, bitorder="little")
    assert byte_indptr.tolist() == indptr_of(tuple(-(-int(n) // 8) for n in bits.diff())).tolist()
    expected, begin = [], 0
    for request, mask in enumerate(masks):
        pages = batch.cache[batch.indices[batch.indptr[request] : batch.indptr[request + 1]].long()]
        k, v = (pages[:, i].reshape(-1, KV_HEADS, DIM)[: KV_LENS[request]] for i in range(2))
        expected.append(attention(batch.q[begin : begin + len(mask)], k, v, mask=mask))
        begin += len(mask)
    for given in ({"custom_mask": flat}, {"packed_custom_mask": packed}, {"custom_mask": flat.to(torch.uint8) * 3}):
        for causal in (False, True):
            wrapper = prefill(batch, causal=causal, **given)
            close(wrapper.run(batch.q, batch.cache), torch.cat(expected))
    plan_prefill(wrapper, batch)  # without a mask again
    close(wrapper.run(batch.q, batch.cache), batch.expected(batch.q))


def test_multi_item_scoring() -> None:
    """Items of 2, 1 and 3 tokens, each after its delimiter, after a prefix of 4: each sees the prefix and itself."""
    prefix, positions = 4, [0, 1, 2, 0, 1, 0, 1, 2, 3]
    tokens = prefix + len(positions)
    q, k, v = torch.randn(tokens, HEADS, DIM), torch.randn(tokens, KV_HEADS, DIM), torch.randn(tokens, KV_HEADS, DIM)
    mask = torch.zeros(tokens, tokens, dtype=torch.bool)
    for row in range(tokens):
        mask[row, : min(row + 1, prefix)] = True
        if row >= prefix:
            mask[row, row - positions[row - prefix] : row + 1] = True
    indptr = torch.tensor([0, tokens], dtype=torch.int32)
    wrapper = flashpage.BatchPrefillWithRaggedKVCacheWrapper(workspace())
    wrapper.plan(
        qo_indptr=indptr,
        kv_indptr=indptr,
        num_qo_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim_qk=DIM,
        q_data_type=torch.float32,
        prefix_len_ptr=torch.tensor([prefix]),
        token_pos_in_items_ptr=torch.tensor(positions, dtype=torch.int16),
        token_pos_in_items_len=len(positions),
        max_item_len_ptr=torch.tensor([3]),
    )
    close(wrapper.run(q, k, v), attention(q, k, v, mask=mask))


def test_sink_wrapper(batch: Batch) -> None:
    wrapper = flashpage.BatchAttentionWithAttentionSinkWrapper(
        workspace(),
        "NHD",
        q_data_type=torch.float32,
        kv_data_type=torch.float32,
        head_dim_qk=DIM,
        head_dim_vo=DIM,
        window_left=5,
    )
    plan_prefill(wrapper, batch, causal=True)
    sinks, pair = torch.randn(HEADS), (batch.cache[:, 0], batch.cache[:, 1])
    expected = batch.expected(batch.q, causal=True, window_left=5, sinks=sinks, sm_scale=0.2)
    out = torch.empty_like(batch.q)
    assert wrapper.run(batch.q, pair, sinks, 0.2, v_scale=2.0, out=out) is out
    close(out, 2 * expected)
    close(wrapper.run(batch.q, pair, sinks), batch.expected(batch.q, causal=True, window_left=5, sinks=sinks))
    with pytest.raises(flashpage.PlanError, match="head_dim_qk=32 in plan but 64"):
        wrapper.plan(batch.qo_indptr, *batch.pages(), HEADS, KV_HEADS, 32, PAGE, q_data_type=torch.float32)


# ---------------------------------------------------------------- attributes that engines touch


def test_attributes(batch: Batch) -> None:
    wrapper = prefill(batch, causal=True, window_left=7, logits_soft_cap=None, sm_scale=0.25)
    # vLLM asserts these before each run.
    assert (wrapper._causal, wrapper._window_left, wrapper._logits_soft_cap, wrapper._sm_scale) == (True, 7, 0.0, 0.25)
    wrapper.forward(batch.q, batch.cache)
    plan_prefill(wrapper, batch, causal=True, window_left=7, logits_soft_cap=None, sm_scale=0.25)
    assert (wrapper._causal, wrapper._window_left, wrapper._logits_soft_cap, wrapper._sm_scale) == (True, 7, 0.0, 0.25)
    wrapper.vllm_first_call = False
    assert wrapper.is_cuda_graph_enabled is False
    assert wrapper._paged_kv_indices_buf is batch.indices and wrapper._custom_mask_buf is None
    # mini-sglang shares the int workspace and names the backend.
    other = decode(batch)
    other._int_workspace_buffer = wrapper._int_workspace_buffer
    other._backend = "fa2"
    assert other._int_workspace_buffer is wrapper._int_workspace_buffer
    with pytest.raises(flashpage.RunError, match="no plan"):
        other.run(batch.q_decode, batch.cache)
    assert other.use_tensor_cores is False and other.end_forward() is None
    assert other._float_workspace_buffer.device == other.device
    assert wrapper.resolved_backend == "cpu_attention"


def test_begin_forward_is_assignable(batch: Batch) -> None:
    """sglang installs fast_decode_plan for graph replays, and passes the indptr on the host and on the device."""
    wrapper = decode(batch)
    expected = wrapper.run(batch.q_decode, batch.cache)
    wrapper.begin_forward = functools.partial(flashpage.fast_decode_plan, wrapper)
    assert wrapper.begin_forward.func is flashpage.fast_decode_plan
    wrapper.begin_forward(
        torch.zeros_like(batch.indptr),
        *batch.pages()[1:],
        num_qo_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        page_size=PAGE,
        data_type=torch.float32,
        global_override_indptr_cpu=batch.indptr,
    )
    assert torch.equal(wrapper.run(batch.q_decode, batch.cache), expected)


def test_data_type_sets_the_cache_alone(batch: Batch) -> None:
    wrapper = flashpage.BatchDecodeWithPagedKVCacheWrapper(workspace())
    wrapper.plan(*batch.pages(), HEADS, KV_HEADS, DIM, PAGE, data_type=torch.float8_e5m2)
    assert wrapper._options.q_dtype.value == "float16" and wrapper._options.kv_dtype.value == "float8_e5m2"
    flashpage.fast_decode_plan(wrapper, *batch.pages(), HEADS, KV_HEADS, DIM, PAGE, data_type="bfloat16")
    assert wrapper._options.q_dtype.value == wrapper._options.kv_dtype.value == "bfloat16"


@pytest.mark.parametrize("q_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_queries_have_16_bit_outputs(batch: Batch, q_dtype: torch.dtype) -> None:
    """Outputs are bf16 and the cache has q's type, unless plan gets other types."""
    wrapper = flashpage.BatchDecodeWithPagedKVCacheWrapper(workspace())
    for told, expected in ((None, torch.bfloat16), ("float16", torch.float16)):
        wrapper.plan(*batch.pages(), HEADS, KV_HEADS, DIM, PAGE, q_data_type=q_dtype, o_data_type=told)
        assert wrapper.run(batch.q_decode.to(q_dtype), batch.cache.to(q_dtype)).dtype == expected
    with pytest.raises(CapabilityError, match="kv_data_type bfloat16 is neither"):
        wrapper.plan(*batch.pages(), HEADS, KV_HEADS, DIM, PAGE, q_data_type=q_dtype, kv_data_type="bfloat16")
    with pytest.raises(CapabilityError, match="o_data_type float8_e5m2"):
        wrapper.plan(*batch.pages(), HEADS, KV_HEADS, DIM, PAGE, q_data_type=q_dtype, o_data_type=torch.float8_e5m2)


def test_deprecated_positions(batch: Batch) -> None:
    wrapper = flashpage.BatchDecodeWithPagedKVCacheWrapper(workspace())
    with pytest.warns(DeprecationWarning, match="pos_encoding_mode, window_left"):
        wrapper.plan(*batch.pages(), HEADS, KV_HEADS, DIM, PAGE, "NONE", 3, None, "float32", sm_scale=0.5)
    expected = batch.expected(batch.q_decode, window_left=3, sm_scale=0.5)
    close(wrapper.run(batch.q_decode, batch.cache), expected)
    with pytest.raises(flashpage.PlanError, match="at most 23"):
        wrapper.plan(*batch.pages(), HEADS, KV_HEADS, DIM, PAGE, *[None] * 17)


# ---------------------------------------------------------------- index tensors


def strided(tensor: torch.Tensor) -> torch.Tensor:
    wide = torch.full((len(tensor), 3), -9, dtype=tensor.dtype)
    wide[:, 1] = tensor
    return wide[:, 1]


@pytest.mark.parametrize(
    "change", [torch.Tensor.long, strided, lambda t: strided(t.long())], ids=["long", "strided", "both"]
)
def test_index_tensors_are_read_as_they_are(batch: Batch, change: Any) -> None:
    wrapper = flashpage.BatchPrefillWithPagedKVCacheWrapper(workspace())
    lengths = [change(tensor) for tensor in (batch.qo_indptr, *batch.pages())]
    wrapper.plan(*lengths, HEADS, KV_HEADS, DIM, PAGE, causal=True, q_data_type=torch.float32)
    expected = batch.expected(batch.q, causal=True)
    close(wrapper.run(batch.q, batch.cache), expected)
    seq_lens = change(torch.tensor(KV_LENS, dtype=torch.int32))
    wrapper.plan(
        *lengths[:3],
        paged_kv_last_page_len=torch.zeros(4, dtype=torch.int32),
        num_qo_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim_qk=DIM,
        page_size=PAGE,
        causal=True,
        q_data_type=torch.float32,
        seq_lens=seq_lens,
    )
    close(wrapper.run(batch.q, batch.cache), expected)


def test_longer_indices_and_an_offset(batch: Batch) -> None:
    """sglang passes 256 page numbers more than needed; an indptr need not start at 0."""
    wrapper = flashpage.BatchDecodeWithPagedKVCacheWrapper(workspace())
    indices = torch.cat([torch.full((5,), -1), batch.indices, torch.full((256,), -1)]).int()
    heads = (HEADS, KV_HEADS, DIM, PAGE)
    wrapper.plan(batch.indptr + 5, indices, batch.last_page_len, *heads, q_data_type=torch.float32)
    close(wrapper.run(batch.q_decode, batch.cache), batch.expected(batch.q_decode))


def test_workspace_size_serves_the_batch(batch: Batch) -> None:
    wrapper = flashpage.BatchPrefillWithPagedKVCacheWrapper(workspace())
    arguments = (batch.qo_indptr, *batch.pages(), HEADS, KV_HEADS, DIM, PAGE)
    for options in ({}, {"fixed_split_size": 2}, {"disable_split_kv": True}):
        needed = wrapper.workspace_size(*arguments, q_data_type=torch.float32, **options)
        buffers = [torch.empty(max(size, 16), dtype=torch.uint8) for size in needed]
        wrapper.reset_workspace_buffer(*buffers)
        plan_prefill(wrapper, batch, **options)
        close(wrapper.run(batch.q, batch.cache), batch.expected(batch.q))


@pytest.mark.parametrize("split", [2**28, 2**30, 2**30 + 1, 2**31 - 1])
def test_a_fixed_split_beyond_any_context_cuts_nothing(batch: Batch, split: int) -> None:
    """2**30 pages of 4 tokens would wrap to 0 in 32 bits, and the pieces would depend on the batch."""
    wrapper = prefill(batch, fixed_split_size=split)
    wrapper.run(batch.q, batch.cache)
    assert wrapper._options.fixed_piece_tokens == SPLIT_NEVER


def test_fixed_split_does_not_depend_on_the_batch(batch: Batch) -> None:
    """A request alone and in the batch: results are bitwise equal."""
    together = prefill(batch, causal=True, fixed_split_size=2)
    found = together.run(batch.q, batch.cache)
    for request, _ in enumerate(ROWS):
        rows = slice(int(batch.qo_indptr[request]), int(batch.qo_indptr[request + 1]))
        pages = batch.indices[batch.indptr[request] : batch.indptr[request + 1]]
        alone = flashpage.BatchPrefillWithPagedKVCacheWrapper(workspace())
        alone.plan(
            qo_indptr=indptr_of((ROWS[request],)),
            paged_kv_indptr=indptr_of((len(pages),)),
            paged_kv_indices=pages,
            paged_kv_last_page_len=batch.last_page_len[request : request + 1],
            num_qo_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim_qk=DIM,
            page_size=PAGE,
            causal=True,
            q_data_type=torch.float32,
            fixed_split_size=2,
        )
        assert torch.equal(alone.run(batch.q[rows], batch.cache), found[rows])


def test_graph_mode_keeps_its_buffers(batch: Batch) -> None:
    """On the CPU nothing is captured, but plans use the same memory for a batch of the same size with other pages."""
    buffers = (torch.zeros(5, dtype=torch.int32), torch.zeros(64, dtype=torch.int32), torch.zeros(4, dtype=torch.int32))
    wrapper = flashpage.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(), *buffers)
    assert wrapper.is_cuda_graph_enabled
    heads = (HEADS, KV_HEADS, DIM, PAGE)
    wrapper.plan(*batch.pages(), *heads, q_data_type=torch.float32)
    close(wrapper.run(batch.q_decode, batch.cache), batch.expected(batch.q_decode))
    assert wrapper._paged_kv_indices_buf is buffers[1]
    assert torch.equal(buffers[1][: len(batch.indices)], batch.indices)
    empty = torch.zeros(5, dtype=torch.int32)
    wrapper.plan(empty, batch.indices, empty[:4], *heads, q_data_type=torch.float32)
    out, lse = wrapper.run_return_lse(batch.q_decode, batch.cache)
    assert not bool(out.any()) and bool((lse == float("-inf")).all())


def test_last_plan_is_of_the_last_run(batch: Batch) -> None:
    wrapper = prefill(batch)
    first = wrapper.last_plan
    covered = len(first.work_items())
    wrapper.forward(batch.q, batch.cache, causal=True)
    assert isinstance(wrapper.last_plan, flashpage.Plan) and len(first.work_items()) == covered
    assert "cpu_attention" in first.explain()


def test_variant_through_plan(batch: Batch) -> None:
    """In Python and in C++. Captured values may change; a change of value alone compiles nothing."""
    wrapper = flashpage.BatchPrefillWithPagedKVCacheWrapper(workspace())
    for window in (2, 5):
        expected = batch.expected(batch.q, causal=True, window_left=window)
        plan_prefill(wrapper, batch, causal=True, variant=flashpage.Variant(mask_mod=within(window)))
        close(wrapper.run(batch.q, batch.cache), expected)
        written = flashpage.Variant(mask="q_idx - kv_idx <= window", scalars={"window": window})
        plan_prefill(wrapper, batch, causal=True, variant=written)
        close(wrapper.run(batch.q, batch.cache), expected)


def within(window: int) -> Any:
    return lambda b, h, q_idx, kv_idx: q_idx - kv_idx <= window


def test_threads_share_a_wrapper(batch: Batch) -> None:
    """Each thread binds its own structs."""
    import threading

    wrapper = decode(batch)
    expected, found = batch.expected(batch.q_decode), []
    thread = threading.Thread(target=lambda: found.append(wrapper.run(batch.q_decode, batch.cache)))
    thread.start()
    thread.join()
    close(found[0], expected)
    close(wrapper.run(batch.q_decode, batch.cache), expected)
