"""FlashInfer's functions over block tables, compared with the fp64 reference."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from reference import Options, attention
from signatures import shown

import flashpage
from flashpage import CapabilityError, FlashpageError, RunError, decode, prefill
from flashpage.wrappers import base, function_plans

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 64, 16
LENGTHS = (5, 40, 17, 0)
WORKSPACE = torch.zeros(16, dtype=torch.uint8)

SIGNATURES = {
    "decode": (
        "query kv_cache workspace_buffer block_tables seq_lens max_seq_len bmm1_scale=1.0 bmm2_scale=1.0 "
        "window_left=-1 out=None out_dtype=None o_sf_scale=None o_sf_vec_size=None sinks=None kv_layout='HND' "
        "enable_pdl=None backend='auto' q_len_per_req=1 o_scale=1.0 mask=None max_q_len=None cum_seq_lens_q=None "
        "skip_softmax_threshold_scale_factor=None kv_cache_sf=None uses_shared_paged_kv_idx=True lse=None "
        "return_lse=False bmm1_scale_log2=None multi_ctas_kv_counter_buffer=None "
        "enable_block_sparse_attention=False cp_world=1 cp_rank=0 causal_seqlens_kv_global=None "
        "bf16q_fp8kv_transform_mode=None request_order=None request_order_plan=None "
        "sparse_top_k=0 length_aware_schedule=False"
    ),
    "context": (
        "query kv_cache workspace_buffer block_tables seq_lens max_q_len max_kv_len bmm1_scale bmm2_scale batch_size "
        "cum_seq_lens_q cum_seq_lens_kv window_left=-1 out=None out_dtype=None o_sf_scale=None o_sf_vec_size=None "
        "kv_layout='HND' enable_pdl=None sinks=None kv_cache_sf=None skip_softmax_threshold_scale_factor=None "
        "uses_shared_paged_kv_idx=True causal=True lse=None return_lse=False multi_ctas_kv_counter_buffer=None "
        "use_fp16_softmax=None uses_spcompress=None backend='trtllm-gen' window_right=-1 "
        "variable_window_token_starts=None variable_window_token_ends=None"
    ),
}
FUNCTIONS: dict[str, Any] = {
    "decode": decode.trtllm_batch_decode_with_kv_cache,
    "context": prefill.trtllm_batch_context_with_kv_cache,
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_parameters(name: str) -> None:
    """Names, order and defaults of FlashInfer 0.7.4; after them, as a keyword alone, ours."""
    *theirs, ours = inspect.signature(FUNCTIONS[name]).parameters.values()
    assert shown(theirs) == SIGNATURES[name].split()
    assert shown([ours]) == ["lse_mode='base2'"] and ours.kind is ours.KEYWORD_ONLY


class Batch:
    """Requests with `rows` query rows each, in pages of a cache whose other tokens are NaN."""

    def __init__(self, rows: tuple[int, ...], device: str, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rows, self.device = rows, device
        self.dtype = torch.float32 if device == "cpu" else torch.bfloat16
        self.q = torch.randn(sum(rows), HEADS, DIM, generator=generator).to(device, self.dtype)
        pages = [-(-n // PAGE) for n in LENGTHS]
        order = torch.randperm(sum(pages) + 3, generator=generator)
        self.tables = torch.full((len(LENGTHS), 4), 10**6, dtype=torch.int32)
        halves = torch.full((len(order), KV_HEADS, PAGE, 2 * DIM), float("nan"))  # a row has K and then V
        self.tokens = []
        for i, (length, count) in enumerate(zip(LENGTHS, pages, strict=True)):
            mine = order[sum(pages[:i]) :][:count]
            self.tables[i, :count] = mine
            tokens = torch.randn(length, KV_HEADS, 2 * DIM, generator=generator).to(self.dtype).float()
            self.tokens.append(tokens)
            at = torch.arange(length)
            halves[mine[at // PAGE], :, at % PAGE] = tokens
        self.halves = halves.to(device, self.dtype)
        self.tables = self.tables.to(device)
        self.lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=device)
        indptr = torch.tensor([0, *rows], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        self.indptr = indptr.to(device)

    def expected(self, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        sinks = options.pop("sinks", None)
        begins = [sum(self.rows[:i]) for i in range(len(self.rows))]
        states = []
        for begin, rows, tokens in zip(begins, self.rows, self.tokens, strict=True):
            q = self.q[begin : begin + rows].cpu()
            states.append(attention(q, tokens[..., :DIM], tokens[..., DIM:], Options(**options, sinks=sinks)))
        return torch.cat([state.out for state in states]), torch.cat([state.lse for state in states])

    def check(self, found: Any, expected: tuple[torch.Tensor, torch.Tensor], scale: float = 1.0) -> None:
        near = {"rtol": 1e-5, "atol": 1e-5} if self.device == "cpu" else {"rtol": 2e-2, "atol": 2e-2}
        torch.testing.assert_close(found[0].cpu().double(), expected[0] * scale, **near)
        torch.testing.assert_close(found[1].cpu().double(), expected[1], **near)

    def caches(self) -> dict[str, tuple[Any, str]]:
        """The cache in the forms that callers have, with their layouts."""
        k, v = self.halves.split(DIM, -1)
        both = torch.stack([k, v], 1).contiguous()
        by_token = self.halves.transpose(1, 2)
        return {
            "rows of K and V": (self.halves, "HND"),
            "halves of rows": ((k, v), "HND"),
            "one tensor": (both, "HND"),
            "pair": ((both[:, 0].contiguous(), both[:, 1].contiguous()), "HND"),
            "NHD halves": (by_token.split(DIM, -1), "NHD"),
            "NHD one tensor": (both.transpose(2, 3).contiguous(), "NHD"),
        }

    def decode(self, cache: Any, **options: Any) -> Any:
        given: dict[str, Any] = {"bmm1_scale": DIM**-0.5, "return_lse": True} | options
        return FUNCTIONS["decode"](self.q, cache, WORKSPACE, self.tables, self.lengths, 64, **given)

    def context(self, cache: Any, **options: Any) -> Any:
        given: dict[str, Any] = {"bmm1_scale": DIM**-0.5, "bmm2_scale": 1.0, "return_lse": True} | options
        return FUNCTIONS["context"](
            *(self.q, cache, WORKSPACE, self.tables, self.lengths, 9, 64),
            batch_size=len(LENGTHS),
            cum_seq_lens_q=self.indptr,
            cum_seq_lens_kv=None,
            **given,
        )


CACHES = list(Batch((1, 1, 1, 1), "cpu").caches())


@pytest.mark.parametrize("form", CACHES)
def test_decode_of_every_cache(form: str, device: str, kernels: None) -> None:
    batch = Batch((1, 1, 1, 1), device)
    cache, layout = batch.caches()[form]
    batch.check(batch.decode(cache, kv_layout=layout), batch.expected(sm_scale=DIM**-0.5))


@pytest.mark.parametrize("form", CACHES)
def test_context_of_every_cache(form: str, device: str, kernels: None) -> None:
    batch = Batch((3, 9, 1, 2), device)
    cache, layout = batch.caches()[form]
    found = batch.context(cache, kv_layout=layout)
    batch.check(found, batch.expected(sm_scale=DIM**-0.5, causal=True))
    found = batch.context(cache, kv_layout=layout, causal=False)
    batch.check(found, batch.expected(sm_scale=DIM**-0.5, causal=False))


@pytest.mark.parametrize("is_tensor", [False, True])
def test_scales_windows_and_sinks(is_tensor: bool, device: str, kernels: None) -> None:
    """Scales as numbers, or as tensors of one entry."""
    batch = Batch((1, 1, 1, 1), device)
    sinks = torch.randn(HEADS, generator=torch.Generator().manual_seed(5))

    def scale(value: float) -> Any:
        return torch.tensor([value], device=device) if is_tensor else value

    options = {"bmm1_scale": scale(0.3), "bmm2_scale": scale(1.5), "window_left": 7, "sinks": sinks.to(device)}
    found = batch.decode(batch.halves, **options)
    batch.check(found, batch.expected(sm_scale=0.3, window_left=7, sinks=sinks), 1.5)
    again = batch.decode(batch.halves, **options | {"sinks": [sinks.to(device)]})
    assert torch.equal(again[0], found[0])


def test_several_rows_a_request(device: str, kernels: None) -> None:
    """Rows are causal among themselves; lengths by request are the same as equal ones."""
    batch = Batch((2, 2, 2, 2), device)
    expected = batch.expected(sm_scale=DIM**-0.5, causal=True)
    batch.check(batch.decode(batch.halves, q_len_per_req=2), expected)
    batch.check(batch.decode(batch.halves, q_len_per_req=None, cum_seq_lens_q=batch.indptr, max_q_len=2), expected)
    other = Batch((1, 3, 0, 2), device)
    found = other.decode(other.halves, q_len_per_req=None, cum_seq_lens_q=other.indptr, max_q_len=3)
    other.check(found, other.expected(sm_scale=DIM**-0.5, causal=True))


def test_lengths_are_read_at_every_call(device: str, kernels: None) -> None:
    """Lengths and tables that changed in place, without a sign that torch sees."""
    batch = Batch((1, 1, 1, 1), device)
    batch.decode(batch.halves)
    other = Batch((1, 1, 1, 1), device, seed=1)
    for name in ("tables", "halves", "q"):
        getattr(batch, name).data.copy_(getattr(other, name))
    batch.lengths.data[1] = 3
    found = batch.decode(batch.halves)
    batch.tokens = [other.tokens[0], other.tokens[1][:3], *other.tokens[2:]]
    batch.check(found, batch.expected(sm_scale=DIM**-0.5))


def test_rows_of_no_request(device: str, kernels: None) -> None:
    batch = Batch((1, 3, 0, 2), device)
    expected = batch.expected(sm_scale=DIM**-0.5, causal=True)
    used, batch.q = len(batch.q), torch.cat([batch.q, torch.full_like(batch.q, torch.nan)])
    out, lse = batch.context(batch.halves)
    batch.check((out[:used], lse[:used]), expected)
    assert not out[used:].any() and bool((lse[used:] == -torch.inf).all())


def test_outputs_are_written_in_place(device: str, kernels: None) -> None:
    batch = Batch((1, 1, 1, 1), device)
    out, lse = torch.empty_like(batch.q), torch.empty(4, HEADS, device=device)
    found = batch.decode(batch.halves, out=out, lse=lse, return_lse=False)
    assert found is out
    batch.check((out, lse), batch.expected(sm_scale=DIM**-0.5))
    lens = batch.lengths.view(torch.uint32)
    again = FUNCTIONS["decode"](
        *(batch.q, batch.halves, WORKSPACE, batch.tables, lens, 64, DIM**-0.5), multi_ctas_kv_counter_buffer=WORKSPACE
    )
    assert torch.equal(again, out)


def test_layers_share_plans_of_equal_options() -> None:
    """Scales that differ by layer make no plans of their own."""
    function_plans._local.__dict__.clear()
    batch = Batch((1, 1, 1, 1), "cpu")
    for layer in range(5):
        batch.decode(batch.halves, bmm1_scale=0.1 + layer)
    batch.decode(batch.halves, window_left=3)
    assert len(function_plans._local.plans) == 2 and len(function_plans._local.workspaces) == 1
    for window in range(function_plans._MOST_PLANS + 3):
        batch.decode(batch.halves, window_left=window)
    assert len(function_plans._local.plans) == function_plans._MOST_PLANS


def test_graphs_with_different_workspaces_share_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of a graph have one workspace and share a plan; the first graph has the memory of eager calls."""
    function_plans._local.__dict__.clear()
    monkeypatch.setattr(function_plans, "_captured", set())
    captures, used = False, []
    monkeypatch.setattr(function_plans, "is_capturing", lambda _: captures)
    run = base.Attention.run
    monkeypatch.setattr(base.Attention, "run", lambda self, *args, **kw: used.append(self) or run(self, *args, **kw))
    batch, workspaces = Batch((1, 1, 1, 1), "cpu"), [torch.zeros(16, dtype=torch.uint8) for _ in range(4)]

    def memory_of(workspace: Any, **options: Any) -> tuple[int, ...]:
        arguments = batch.q, batch.halves, workspace, batch.tables, batch.lengths, 64, DIM**-0.5
        batch.check(FUNCTIONS["decode"](*arguments, return_lse=True, **options), batch.expected(sm_scale=DIM**-0.5))
        memory = used[-1].session.workspaces
        return memory.float_buffer.data_ptr(), memory.int_buffer.data_ptr()

    eager = memory_of(None)
    used[0].session.use_int_buffer(torch.empty(1 << 20, dtype=torch.uint8))  # as if a larger batch had been planned
    eager = memory_of(workspaces[0])
    assert memory_of(workspaces[1]) == memory_of(None) == eager
    captures = True
    found = [[memory_of(workspace) for _ in range(2)] for workspace in workspaces[:3]]
    assert [first for first, _ in found] == [second for _, second in found] and found[0][0] == eager
    assert all(len({first[i] for first, _ in found}) == 3 for i in range(2))
    assert all(attention.session.workspaces.int_bytes == 1 << 20 for attention in used)
    captures = False
    assert [memory_of(workspace) for workspace in workspaces] == [*(first for first, _ in found), eager]
    assert memory_of(None) == eager


REFUSED = {
    "mask": torch.zeros(1),
    "o_sf_scale": 1.0,
    "o_sf_vec_size": 16,
    "kv_cache_sf": (torch.zeros(1), torch.zeros(1)),
    "skip_softmax_threshold_scale_factor": 1.0,
    "uses_shared_paged_kv_idx": False,
    "bmm1_scale_log2": torch.ones(1),
    "enable_block_sparse_attention": True,
    "cp_world": 2,
    "causal_seqlens_kv_global": torch.ones(1),
    "bf16q_fp8kv_transform_mode": "k_only",
    "request_order": torch.ones(1),
    "request_order_plan": 1,
    "sparse_top_k": 4,
    "backend": "cutlass",
    "out_dtype": "nvfp4",
}


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_of_other_kernels_are_refused(name: str) -> None:
    batch = Batch((1, 1, 1, 1), "cpu")
    error = FlashpageError if name == "out_dtype" else CapabilityError
    with pytest.raises(error, match=name):
        batch.decode(batch.halves, **{name: REFUSED[name]})
    if name in SIGNATURES["context"] and name != "out_dtype":
        with pytest.raises(CapabilityError, match=name):
            batch.context(batch.halves, **{name: REFUSED[name]})


@pytest.mark.parametrize("name", ["window_right", "variable_window_token_starts", "variable_window_token_ends"])
def test_windows_of_other_kernels_are_refused(name: str) -> None:
    batch = Batch((3, 9, 1, 2), "cpu")
    with pytest.raises(CapabilityError, match=name):
        batch.context(batch.halves, **{name: 1 if name == "window_right" else torch.zeros(15, dtype=torch.int32)})


def test_arguments_without_effect() -> None:
    """A window to the right of no token is causal."""
    batch = Batch((3, 9, 1, 2), "cpu")
    expected = batch.expected(sm_scale=DIM**-0.5, causal=True, window_left=4)
    for given in ({"causal": False, "window_right": 0}, {"window_right": 0}, {"window_right": -1}):
        batch.check(batch.context(batch.halves, window_left=4, **given), expected)
    batch = Batch((1, 1, 1, 1), "cpu")
    found = batch.decode(batch.halves, length_aware_schedule=True, sparse_top_k=0)
    batch.check(found, batch.expected(sm_scale=DIM**-0.5))


def test_outputs_of_e4m3_are_divided_by_their_scale() -> None:
    batch = Batch((1, 1, 1, 1), "cpu")
    exact, _ = batch.expected(sm_scale=DIM**-0.5)
    found = batch.decode(batch.halves, out_dtype=torch.float8_e4m3fn, o_scale=0.25)[0]
    assert found.dtype == torch.float8_e4m3fn
    torch.testing.assert_close(found.double(), exact * 4, rtol=2**-4, atol=2**-10)
    with pytest.raises(RunError, match="o_scale=0.25 but the plan's outputs are float32"):
        batch.decode(batch.halves, o_scale=0.25)


def test_wrong_arguments() -> None:
    batch = Batch((1, 1, 1, 1), "cpu")
    with pytest.raises(RunError, match=r"kv_cache has shape \(7, 2, 16, 100\)"):
        batch.decode(torch.zeros(7, 2, 16, 100))
    with pytest.raises(RunError, match="query has 4 rows but seq_lens has 4 entries and q_len_per_req=3"):
        batch.decode(batch.halves, q_len_per_req=3)
    with pytest.raises(RunError, match="pass one of them"):
        batch.decode(batch.halves, cum_seq_lens_q=batch.indptr)
    with pytest.raises(RunError, match="bmm1_scale='a'"):
        batch.decode(batch.halves, bmm1_scale="a")
    with pytest.raises(RunError, match="batch_size=3 but seq_lens has 4"):
        FUNCTIONS["context"](
            *(batch.q, batch.halves, WORKSPACE, batch.tables, batch.lengths, 1, 64, 1.0, 1.0, 3, batch.indptr, None)
        )


@pytest.mark.parametrize(("num_q", "num_kv", "expected"), [(8, 8, True), (32, 8, True), (24, 8, False), (16, 1, False)])
def test_group_sizes(num_q: int, num_kv: int, expected: bool) -> None:
    assert flashpage.decode._grouped_size_compiled_for_decode_kernels(num_q, num_kv) is expected


@pytest.mark.cuda
def test_captured_calls_plan_again() -> None:
    """A replay plans from the lengths of that time, for two layers with their own windows."""
    batch = Batch((1, 1, 1, 1), "cuda")
    windows = (-1, 5)

    def layers() -> list[Any]:
        return [batch.decode(batch.halves, window_left=window) for window in windows]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # the cache was written there
    with torch.cuda.stream(stream):
        layers()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = layers()
    batch.lengths[1] = 9
    batch.tokens[1] = batch.tokens[1][:9]
    batch.decode(batch.halves, window_left=2)  # an eager call between the replays
    graph.replay()
    for found, window in zip(captured, windows, strict=True):
        batch.check(found, batch.expected(sm_scale=DIM**-0.5, window_left=window))
