"""BatchMLAPagedAttentionWrapper: the ways to plan a batch and to pass tensors, LSE modes, graphs, and refusals."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

import flashpage
from flashpage import CapabilityError, MLAPlanMetadata, PlanError, RunError
from flashpage.kernels import choose, devices
from flashpage.kernels.work import Problem

pytestmark = pytest.mark.usefixtures("quick_kernels")

CKV, KPE, HEADS, PAGE = 512, 64, 16, 16
ROWS, TOKENS = (1, 3, 1), (40, 33, 5)
SIZES: dict[str, Any] = {"num_heads": HEADS, "head_dim_ckv": CKV, "head_dim_kpe": KPE, "page_size": PAGE}
OPTIONS: dict[str, Any] = {"causal": True, "sm_scale": 192**-0.5, "q_data_type": torch.float32}


def indptr(counts: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *counts]).cumsum(0).int()


class Batch:
    """A batch in pages, and its exact result."""

    def __init__(self, rows: tuple[int, ...] = ROWS, tokens: tuple[int, ...] = TOKENS) -> None:
        torch.manual_seed(1)
        pages = tuple(-(-n // PAGE) for n in tokens)
        self.q_indptr, self.kv_indptr, self.lens = indptr(rows), indptr(pages), torch.tensor(tokens).int()
        self.indices = torch.randperm(sum(pages)).int()
        self.q = torch.randn(sum(rows), HEADS, CKV + KPE)
        self.cache = torch.randn(sum(pages), PAGE, CKV + KPE)
        self.tables = torch.zeros(len(rows), max(pages), dtype=torch.int32)
        for i, count in enumerate(pages):
            self.tables[i, :count] = self.indices[self.kv_indptr[i] : self.kv_indptr[i] + count]
        self.out, self.lse = torch.empty(len(self.q), HEADS, CKV), torch.empty(len(self.q), HEADS)
        for i, (count, n) in enumerate(zip(rows, tokens, strict=True)):
            mine = slice(int(self.q_indptr[i]), int(self.q_indptr[i]) + count)
            row = self.cache[self.tables[i, : pages[i]].long()].flatten(0, 1)[:n].double()
            scores = torch.einsum("rhd,td->rht", self.q[mine].double(), row) * OPTIONS["sm_scale"]
            hidden = torch.arange(n) > torch.arange(count)[:, None] + n - count
            scores.masked_fill_(hidden[:, None], -math.inf)
            self.lse[mine] = scores.logsumexp(-1) / math.log(2)
            self.out[mine] = torch.einsum("rht,td->rhd", scores.softmax(-1), row[:, :CKV]).float()

    def csr(self) -> MLAPlanMetadata:
        return MLAPlanMetadata.csr(self.q_indptr, self.kv_indptr, self.indices, self.lens)

    def parts(self) -> tuple[torch.Tensor, ...]:
        return self.q[..., :CKV], self.q[..., CKV:], self.cache[..., :CKV], self.cache[..., CKV:]


def wrapper_of(**options: Any) -> flashpage.BatchMLAPagedAttentionWrapper:
    return flashpage.BatchMLAPagedAttentionWrapper(torch.empty(4 << 20, dtype=torch.uint8), **options)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("form", ["csr", "dense", "dense-bounded", "dual", "keywords", "positions"])
def test_ways_to_plan(form: str) -> None:
    batch, wrapper = Batch(), wrapper_of()
    arrays = (batch.q_indptr, batch.kv_indptr, batch.indices, batch.lens)
    if form == "positions":
        options = OPTIONS["causal"], OPTIONS["sm_scale"], torch.float32, torch.float32
        with pytest.warns(DeprecationWarning, match="metadata="):
            wrapper.plan(*arrays, *SIZES.values(), *options)
    elif form == "keywords":
        names = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
        wrapper.plan(**dict(zip(names, arrays, strict=True)), **SIZES, **OPTIONS)
    else:
        most = 3 if form == "dense-bounded" else None
        metadata = {
            "csr": batch.csr(),
            "dual": MLAPlanMetadata.dual(*arrays, batch.tables),
        }.get(form, MLAPlanMetadata.dense(batch.q_indptr, batch.tables, batch.lens, most))
        wrapper.plan(metadata=metadata, **SIZES, **OPTIONS)
    close(wrapper.run(*batch.parts()), batch.out)


def test_a_table_on_the_device_is_planned_there() -> None:
    """On the CPU the same function is called."""
    batch, wrapper = Batch(), wrapper_of()
    wrapper.plan(metadata=batch.csr(), **SIZES, **OPTIONS)
    wrapper._plan_tables(MLAPlanMetadata.dense(batch.q_indptr, batch.tables, batch.lens, 2))
    q = torch.cat([batch.q, torch.full_like(batch.q[:1], math.nan)])  # max_q_len bounds the rows: 3 requests of 2
    out = wrapper.run(query=q, kv_cache=batch.cache)
    close(out[:5], batch.out)
    close(wrapper.run(query=batch.q, kv_cache=batch.cache), batch.out)
    with pytest.raises(RunError, match="query has 4 rows"):
        wrapper.run(query=batch.q[:4], kv_cache=batch.cache)


def test_tensors_together_and_apart() -> None:
    batch, wrapper = Batch(), wrapper_of()
    wrapper.plan(metadata=batch.csr(), **SIZES, **OPTIONS, query_layout="packed")
    together = wrapper.run(query=batch.q, kv_cache=batch.cache)
    views = wrapper.run(*batch.parts())
    apart = wrapper.run(*(part.clone() for part in batch.parts()))
    assert torch.equal(together, views) and torch.equal(together, apart)
    q_nope, q_pe, _, _ = batch.parts()
    assert torch.equal(wrapper.run(q_nope, q_pe, kv_cache=batch.cache), together)
    negative = torch._neg_view(q_pe)  # next to q_nope, too
    assert torch.equal(
        wrapper.run(q_nope, negative, kv_cache=batch.cache), wrapper.run(q_nope, -q_pe, kv_cache=batch.cache)
    )
    backwards = torch.cat([q_pe, q_nope], -1)  # views of one tensor, but in the other order
    assert torch.equal(wrapper.run(backwards[..., KPE:], backwards[..., :KPE], kv_cache=batch.cache), together)


def test_modes_of_lse() -> None:
    batch, wrapper = Batch(), wrapper_of()
    for mode, factor in ((None, 1.0), ("base2", 1.0), ("none", 1.0), ("basee", math.log(2))):
        wrapper.plan(metadata=batch.csr(), **SIZES, **OPTIONS, lse_mode=mode)
        lse = torch.empty_like(batch.lse)
        _out, found = wrapper.run(*batch.parts(), lse=lse, return_lse=True)
        assert found is lse
        close(lse, batch.lse * factor)
        close(wrapper.run_return_lse(*batch.parts(), return_lse_base_on_e=True)[1], batch.lse * math.log(2))
    wrapper.plan(metadata=batch.csr(), **SIZES, **OPTIONS)
    with pytest.raises(PlanError, match="both give the batch"):  # after which the plan before holds, with its mode
        wrapper.plan(metadata=batch.csr(), qo_indptr=batch.q_indptr, **SIZES, **OPTIONS, lse_mode="basee")
    close(wrapper.run_return_lse(*batch.parts())[1], batch.lse)


def test_lengths_that_change_later_do_not_matter() -> None:
    batch, wrapper = Batch(), wrapper_of()
    wrapper.plan(metadata=batch.csr(), **SIZES, **OPTIONS)
    for array in (batch.q_indptr, batch.kv_indptr, batch.indices, batch.lens):
        array.fill_(7)
    close(wrapper.run(*batch.parts()), batch.out)


def test_planning_as_sglang_does() -> None:
    """Its graph runner writes page numbers to the buffer and calls _cached_module.plan with arrays of the host."""
    batch = Batch(rows=(1, 1, 1))
    buffers = {
        "qo_indptr": torch.zeros(4, dtype=torch.int32),
        "kv_indptr": torch.zeros(4, dtype=torch.int32),
        "kv_indices": torch.zeros(64, dtype=torch.int32),
        "kv_len_arr": torch.zeros(3, dtype=torch.int32),
    }
    wrapper = wrapper_of(use_cuda_graph=True, **buffers)
    assert wrapper._cached_module is None
    first = Batch(rows=(1, 1, 1), tokens=(3, 4, 5))
    wrapper.plan(metadata=first.csr(), **SIZES, **OPTIONS)
    close(wrapper.run(*first.parts()), first.out)
    buffers["kv_indices"][: len(batch.indices)] = batch.indices
    memory = (wrapper._float_workspace_buffer, wrapper._int_workspace_buffer, wrapper._pin_memory_int_workspace_buffer)
    wrapper._cached_module.plan(*memory, batch.q_indptr, batch.kv_indptr, batch.lens, HEADS, CKV, True)
    close(wrapper.run(*batch.parts()), batch.out)
    wrapper._page_size = PAGE // 2
    with pytest.raises(PlanError, match=r"kv_len_arr\[\d\]=\d+ exceeds the"):
        wrapper._cached_module.plan(*memory, batch.q_indptr, batch.kv_indptr, batch.lens, HEADS, CKV, True)
    assert wrapper._kv_len_arr_buf is buffers["kv_len_arr"] and wrapper._kv_indices_buf is buffers["kv_indices"]


def test_under_compile() -> None:
    batch, wrapper = Batch(), wrapper_of()
    wrapper.plan(metadata=batch.csr(), **SIZES, **OPTIONS)
    run = torch.compile(lambda *parts: wrapper.run(*parts) * 2, fullgraph=True, backend="aot_eager")
    close(run(*batch.parts()), batch.out * 2)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"sm_scale": None}, "sm_scale=None"),
        ({"num_heads": 0}, "num_qo_heads|num_heads"),
        ({"head_dim_ckv": None}, "head_dim_ckv"),
        ({"lse_mode": "base10"}, "lse_mode"),
        ({"query_layout": "joined"}, "query_layout"),
        ({"scale_mode": "bmm-scalar"}, "scale_mode"),
        ({"metadata": (1, 2)}, "metadata="),
        ({"metadata": MLAPlanMetadata.dense(torch.ones(3).int(), *torch.ones(2, 2, 1).int())}, "kv_len_arr has shape"),
        ({"kv_indptr": torch.zeros(2)}, "both give the batch"),
        ({"use_profiler": 3}, "use_profiler"),
        ({"skip_softmax": True}, "skip_softmax"),
        ({"kv_row_format": "deepseek"}, "kv_row_format"),
        ({"kv_row_format": "deepseek_v4"}, "other rows than head_dim_ckv=512 and head_dim_kpe=64: pass 512 and 0"),
        ({"kv_row_format": "deepseek_v32", "kv_data_type": torch.bfloat16}, "leave kv_data_type None"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_refused_plans(change: dict[str, Any], says: str) -> None:
    batch, wrapper = Batch(), wrapper_of()
    with pytest.raises((PlanError, CapabilityError), match=says):
        wrapper.plan(**({"metadata": batch.csr()} | SIZES | OPTIONS | change))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"head_dim_ckv": 520}, "head_dim_ckv 520 is not a multiple of 8 from 16 to 512"),
        ({"head_dim_kpe": 128}, "head_dim_kpe 128"),
        ({"kv_data_type": torch.float8_e5m2}, "no latent rows of float8_e5m2"),
    ],
    ids=["ckv", "kpe", "fp8"],
)
def test_what_no_kernel_takes(change: dict[str, Any], says: str) -> None:
    batch, wrapper = Batch(), wrapper_of()
    with pytest.raises(CapabilityError, match=says):
        wrapper.plan(**({"metadata": batch.csr()} | SIZES | OPTIONS | change))


def test_refused_runs() -> None:
    batch, wrapper = Batch(), wrapper_of()
    wrapper.plan(metadata=batch.csr(), **SIZES, **OPTIONS)
    q_nope, q_pe, ckv, kpe = batch.parts()
    for tensors, options, says in (
        ((q_nope, q_pe, ckv, kpe), {"query": batch.q}, "query and q_nope and q_pe are both given"),
        ((q_nope, q_pe[:2], ckv, kpe), {}, "equal leading sizes"),
        ((q_nope, None, ckv, kpe), {}, "q_pe"),
        ((q_nope, q_pe, ckv, kpe[..., :32]), {}, "kpe_cache has a head dimension of 32"),
        ((q_nope, q_pe, ckv[:, :8], kpe[:, :8]), {}, "pages of 8 tokens"),
        ((q_nope, q_pe, ckv[:2], kpe[:2]), {}, "kv_indices reach"),
        ((q_nope, q_pe, ckv, kpe), {"ckv_scale": 1.0}, "ckv_scale"),
        ((q_nope, q_pe, ckv, kpe), {"kv_len": batch.lens}, "kv_len"),
        ((q_nope, q_pe, ckv, kpe), {"out": batch.cache[0]}, "out"),
    ):
        with pytest.raises((RunError, CapabilityError), match=says):
            wrapper.run(*tensors, **options)
    close(wrapper.run(*batch.parts()), batch.out)


def test_a_view_may_span_more_than_a_kernel_can_address(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, wrapper = Batch(), wrapper_of()
    wrapper.plan(metadata=batch.csr(), **SIZES, **OPTIONS)
    prepared = wrapper._planner.active[0].prepared
    choice = prepared.choice
    most = batch.cache.numel() * batch.cache.element_size()
    few = dataclasses.replace(choice.kernel, most_cache_bytes=lambda spec: most)
    monkeypatch.setattr(prepared, "choice", dataclasses.replace(choice, kernel=few))
    close(wrapper.run(*batch.parts()), batch.out)
    pool = torch.zeros(len(batch.cache), 2, *batch.cache.shape[1:], dtype=batch.cache.dtype)  # of two layers
    pool[:, 1] = batch.cache
    with pytest.raises(RunError, match=f"K spans .* reads at most {most}"):
        wrapper.run(query=batch.q, kv_cache=pool[:, 1])
    longer = torch.cat([batch.cache, batch.cache])  # with which a binding is only resized
    with pytest.raises(RunError, match=f"K spans .* reads at most {most}"):
        wrapper.run(query=batch.q, kv_cache=longer)
    wrapper.plan(metadata=batch.csr(), **SIZES, **OPTIONS)
    monkeypatch.setattr(prepared, "choice", choice)
    wrapper.run(query=batch.q, kv_cache=longer)
    monkeypatch.setattr(prepared, "choice", dataclasses.replace(choice, kernel=few))
    wrapper.plan(metadata=batch.csr(), **SIZES, **OPTIONS)  # whose kernel addresses less
    with pytest.raises(RunError, match=f"K spans .* reads at most {most}"):
        wrapper.run(query=batch.q, kv_cache=longer)


def test_scales_of_tokens_are_for_the_pages_of_the_run() -> None:
    """A wrapper serves caches of several sizes."""
    batch, wrapper = Batch(), wrapper_of()
    options = SIZES | OPTIONS | {"q_data_type": torch.bfloat16, "kv_data_type": torch.float8_e4m3fn}
    wrapper.plan(metadata=batch.csr(), **options)
    pages, small = len(batch.cache), batch.cache.to(torch.float8_e4m3fn)
    large = torch.cat([small.view(torch.uint8)] * 2).view(torch.float8_e4m3fn)
    found = []
    for cache in (small, large, small):
        scales = torch.full((len(cache), PAGE, 4), 0.5)
        found.append(wrapper.run(query=batch.q.bfloat16(), kv_cache=cache, ckv_scale_arr=scales))
        other = torch.ones(3 * pages - len(cache), PAGE, 4)
        with pytest.raises(RunError, match="ckv_scale_arr has shape"):
            wrapper.run(query=batch.q.bfloat16(), kv_cache=cache, ckv_scale_arr=other)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_refused_scales_and_rows() -> None:
    batch, wrapper = Batch(), wrapper_of()
    q = batch.q.bfloat16()
    options = SIZES | OPTIONS | {"q_data_type": torch.bfloat16}
    wrapper.plan(metadata=batch.csr(), **options, kv_data_type=torch.float8_e4m3fn)
    cache, scales = batch.cache.to(torch.float8_e4m3fn), torch.ones(*batch.cache.shape[:2], 4)
    for given, says in (
        ({"ckv_scale": 1.0, "ckv_scale_arr": scales}, "both given"),
        ({"ckv_scale_arr": scales[:1]}, "ckv_scale_arr has shape"),
        ({"ckv_scale_arr": scales.double()}, "torch.float64"),
        ({"ckv_scale_arr": torch.ones(scales.numel() + 1)[1:].view(scales.shape)}, "starts on 16 bytes"),
        ({"ckv_scale_arr": 1.0}, "ckv_scale_arr"),
        ({"ckv_scale": 0.0}, "ckv_scale=0.0: pass a positive number"),
        ({"kpe_scale": torch.ones(2)}, r"kpe_scale has shape \(2,\): pass one entry\."),
    ):
        with pytest.raises(RunError, match=says):
            wrapper.run(query=q, kv_cache=cache, **given)
    wrapper.plan(metadata=batch.csr(), **options, kv_row_format="deepseek_v32")
    rows = torch.zeros(*batch.cache.shape[:2], 656, dtype=torch.uint8)
    for tensors, says in (
        ({"ckv_cache": rows, "kpe_cache": rows}, "pass kv_cache alone"),
        ({"kv_cache": rows[..., :640]}, "a head dimension of 640 but the plan is for 656"),
        ({"kv_cache": rows.bfloat16()}, "bfloat16"),
        ({"kv_cache": rows, "ckv_scale": 1.0}, "only rows of kv_data_type float8_e4m3fn take it"),
    ):
        with pytest.raises((RunError, CapabilityError), match=says):
            wrapper.run(query=q, **tensors)
    assert wrapper.run(query=q, ckv_cache=rows).abs().max() == 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"q_data_type": torch.float32}, "q_data_type float32 is not among"),
        ({"head_dim_ckv": 320}, "head_dim_ckv 320 is not a multiple of 64 up to 256, 384 or 512"),
        ({"head_dim_kpe": 24}, "head_dim_kpe 24 is not a multiple of 16"),
    ],
    ids=["fp32", "ckv", "kpe"],
)
def test_what_cards_refuse(change: dict[str, Any], says: str) -> None:
    wrapper = wrapper_of()
    wrapper.plan(metadata=Batch().csr(), **(SIZES | OPTIONS | {"q_data_type": torch.bfloat16} | change))
    for card in devices.CARDS:
        with pytest.raises(CapabilityError, match=says):
            choose.choose_for_card(Problem(wrapper._options, 16), card)
