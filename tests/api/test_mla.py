"""BatchMLAPagedAttentionWrapper: the ways to pass tensors, LSE modes, scales, and refusals."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from latent_batches import CKV, HEADS, KPE, OPTIONS, PAGE, SIZES, Batch, close, wrapper_of

from flashpage import CapabilityError, PlanError, RunError
from flashpage.kernels import choose, devices
from flashpage.kernels.work import Problem

pytestmark = pytest.mark.usefixtures("quick_kernels")


def test_tensors_together_and_apart() -> None:
    batch, wrapper = Batch(), wrapper_of()
    wrapper.plan(metadata=batch.csr(), **SIZES, **OPTIONS, query_layout="packed", kv_cache_layout="packed")
    together = wrapper.run(query=batch.q, kv_cache=batch.cache)
    views = wrapper.run(*batch.parts())
    wrapper.plan(metadata=batch.csr(), **SIZES, **OPTIONS)
    apart = wrapper.run(*(part.clone() for part in batch.parts()))
    assert torch.equal(together, views) and torch.equal(together, apart)
    wrapper.plan(metadata=batch.csr(), **SIZES, **OPTIONS, query_layout=None, kv_cache_layout=None)  # any
    assert torch.equal(wrapper.run(query=batch.q, kv_cache=batch.cache), together)
    q_nope, q_pe, _, _ = batch.parts()
    assert torch.equal(wrapper.run(q_nope, q_pe, kv_cache=batch.cache), together)
    negative = torch._neg_view(q_pe)  # next to q_nope, too
    assert torch.equal(
        wrapper.run(q_nope, negative, kv_cache=batch.cache), wrapper.run(q_nope, -q_pe, kv_cache=batch.cache)
    )
    backwards = torch.cat([q_pe, q_nope], -1)  # views of one tensor, but in the other order
    assert torch.equal(wrapper.run(backwards[..., KPE:], backwards[..., :KPE], kv_cache=batch.cache), together)


def test_forms_of_flashinfers_tensors() -> None:
    """Pairs, and pairs of the tensor and the pair."""
    batch, wrapper = Batch(), wrapper_of()
    wrapper.plan(metadata=batch.csr(), **SIZES, **OPTIONS)
    together = wrapper.run(query=batch.q, kv_cache=batch.cache)
    q, cache = (batch.q[..., :CKV], batch.q[..., CKV:]), (batch.cache[..., :CKV], batch.cache[..., CKV:])
    for query, kv_cache in ((q, cache), ((batch.q, q), (cache, batch.cache)), (list(q), (batch.cache, list(cache)))):
        assert torch.equal(wrapper.run(query=query, kv_cache=kv_cache), together)


def test_modes_of_lse() -> None:
    batch, wrapper = Batch(), wrapper_of()
    for mode, factor in ((None, 1.0), ("base2", 1.0), ("basee", math.log(2))):
        wrapper.plan(metadata=batch.csr(), **SIZES, **OPTIONS, lse_mode=mode)
        lse = torch.empty_like(batch.lse)
        _out, found = wrapper.run(*batch.parts(), lse=lse, return_lse=True)
        assert found is lse
        close(lse, batch.lse * factor)
        if mode != "base2":
            close(wrapper.run_return_lse(*batch.parts(), return_lse_base_on_e=True)[1], batch.lse * math.log(2))
        close(wrapper.run_return_lse(*batch.parts(), return_lse_base_on_e=0)[1], batch.lse * factor)
    wrapper.plan(metadata=batch.csr(), **SIZES, **OPTIONS)
    with pytest.raises(PlanError, match="both give the batch"):  # after which the plan before holds, with its mode
        wrapper.plan(metadata=batch.csr(), qo_indptr=batch.q_indptr, **SIZES, **OPTIONS, lse_mode="basee")
    close(wrapper.run_return_lse(*batch.parts())[1], batch.lse)


def test_declarations_of_plan_hold_for_runs() -> None:
    batch, wrapper = Batch(), wrapper_of()
    parts, apart = batch.parts(), tuple(part.clone() for part in batch.parts())
    lse, sinks = torch.empty_like(batch.lse), torch.zeros(HEADS)
    whole = {"query": batch.q, "kv_cache": batch.cache}
    for declared, given, options, says in (
        ({"use_sinks": True}, parts, {}, "^sinks=None but plan got use_sinks=True: pass sinks, or plan with"),
        ({"lse_mode": "none"}, parts, {"return_lse": True}, "^return_lse=True but plan got lse_mode='none': plan with"),
        ({"lse_mode": "none"}, parts, {"lse": lse}, "^lse is given but plan got lse_mode='none'"),
        ({"lse_mode": "none"}, parts, {"return_lse_base_on_e": True}, "^return_lse_base_on_e=True but .*='none'"),
        (
            {"lse_mode": "base2"},
            parts,
            {"return_lse_base_on_e": 1},
            "^return_lse_base_on_e=True but .* lse_mode='base2'",
        ),
        (
            {"query_layout": "packed"},
            apart,
            {},
            "^q_nope and q_pe do not lie side by side but plan got query_layout='packed': pass one tensor, or plan",
        ),
        (
            {"kv_cache_layout": "packed"},
            (),
            {"query": batch.q, "kv_cache": apart[2:]},
            r"^kv_cache\[0\] and kv_cache\[1\] do not lie side by side but plan got kv_cache_layout='packed'",
        ),
    ):
        wrapper.plan(metadata=batch.csr(), **SIZES, **OPTIONS, **declared)
        for _ in range(2):  # the second plan has the last one's keywords
            with pytest.raises(RunError, match=says):
                wrapper.run(*given, **options)
            kept = wrapper.run(*parts, **({"sinks": sinks} if "use_sinks" in declared else {}))
            whole_too = wrapper.run(**whole, **({"sinks": sinks} if "use_sinks" in declared else {}))
            assert torch.equal(kept, whole_too)
            wrapper.plan(metadata=batch.csr(), **SIZES, **OPTIONS, **declared)
        wrapper.plan(metadata=batch.csr(), **SIZES, **OPTIONS)
        wrapper.run(*given, **options)
    with pytest.warns(DeprecationWarning):  # FlashInfer's former form, whose mode of LSEs runs say
        arrays, options = tuple(batch.csr_arrays().values()), (True, OPTIONS["sm_scale"], torch.float32, torch.float32)
        wrapper.plan(*arrays, *SIZES.values(), *options, lse_mode="none")
    close(wrapper.run_return_lse(*parts)[1], batch.lse)


def test_under_compile() -> None:
    batch, wrapper = Batch(), wrapper_of()
    wrapper.plan(metadata=batch.csr(), **SIZES, **OPTIONS)
    run = torch.compile(lambda *parts: wrapper.run(*parts) * 2, fullgraph=True, backend="aot_eager")
    close(run(*batch.parts()), batch.out * 2)


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
        ((q_nope, None, ckv, kpe), {}, "^q_pe=None: pass q_nope and q_pe, or query alone."),
        ((q_nope, q_pe, ckv, None), {}, "^kpe_cache=None: pass ckv_cache and kpe_cache, or kv_cache alone."),
        ((q_pe, q_nope, ckv, kpe), {}, "^q_nope has 64 columns but .*head_dim_ckv=512: pass the head_dim_ckv"),
        ((None, None, ckv, kpe), {"query": (q_pe, q_nope)}, r"^query\[0\] has 64 columns"),
        ((None, None, ckv, kpe), {"query": (batch.q,)}, "^query has 1 entries: pass one tensor, or the pair"),
        ((q_nope, q_pe), {"kv_cache": (ckv, kpe[..., :32])}, r"^kv_cache\[1\] has rows of 32 columns .* 64: plan with"),
        ((q_nope, q_pe), {"kv_cache": batch.cache[..., :80]}, "^kv_cache has rows of 80 columns .* is for 576"),
        ((q_nope, q_pe, ckv, kpe[..., :32]), {}, "^kpe_cache has rows of 32 columns but the plan is for 64: plan with"),
        ((q_nope, q_pe, ckv[:, :8], kpe[:, :8]), {}, "^ckv_cache has pages of 8 tokens but the plan"),
        ((torch.cat([q_nope, q_nope], 1), torch.cat([q_pe, q_pe], 1), ckv, kpe), {}, "32 heads .* for num_heads=16"),
        ((q_nope, q_pe, ckv[:2], kpe[:2]), {}, "kv_indices reach"),
        ((q_nope.double(), q_pe.double(), ckv, kpe), {}, "^q_nope and q_pe have dtype torch.float64 but the plan is"),
        (
            (q_nope, q_pe, ckv, kpe),
            {"ckv_scale": 0.0},
            "ckv_scale=0.0 is not supported: rows of q's type have no scales",
        ),
        ((q_nope, q_pe, ckv, kpe), {"kpe_scale": 0}, "kpe_scale=0 is not supported"),
        ((q_nope, q_pe, ckv, kpe), {"bmm1_scale": 1.0}, "bmm1_scale=1.0 is not supported: pass sm_scale to plan"),
        ((q_nope, q_pe, ckv, kpe), {"bmm2_scale": 1.0}, "bmm2_scale"),
        ((q_nope, q_pe, ckv, kpe), {"skip_softmax_threshold_scale_factor": 0.0}, "skip_softmax_threshold_scale_factor"),
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
    few = dataclasses.replace(choice.kernel, most_cache_bytes=most)
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
    for _ in range(2):  # a refused run leaves nothing that C could run
        with pytest.raises(RunError, match=f"K spans .* reads at most {most}"):
            wrapper.run(query=batch.q, kv_cache=longer)
    close(wrapper.run(*batch.parts()), batch.out)


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
        found.append(wrapper.run(query=batch.q.bfloat16(), kv_cache=cache, ckv_scale_arr=scales, kpe_scale=1.0))
        other = torch.ones(3 * pages - len(cache), PAGE, 4)
        with pytest.raises(RunError, match="ckv_scale_arr has shape"):
            wrapper.run(query=batch.q.bfloat16(), kv_cache=cache, ckv_scale_arr=other, kpe_scale=1.0)
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
        ({"ckv_scale": 1.0, "kpe_scale": torch.ones(2)}, r"kpe_scale has shape \(2,\): pass one entry\."),
        ({}, "^ckv_scale=None and ckv_scale_arr=None but the plan has rows of float8_e4m3fn: pass one of them"),
        ({"ckv_scale": 1.0, "kpe_scale": None}, "^kpe_scale=None but the plan has rows of float8_e4m3fn: pass it"),
    ):
        with pytest.raises(RunError, match=says):
            wrapper.run(query=q, kv_cache=cache, **({"kpe_scale": 1.0} | given))
    wrapper.plan(metadata=batch.csr(), **options, kv_row_format="deepseek_v32")
    rows = torch.zeros(*batch.cache.shape[:2], 656, dtype=torch.uint8)
    for tensors, says in (
        ({"ckv_cache": rows, "kpe_cache": rows}, "pass kv_cache alone"),
        ({"kv_cache": rows[..., :640]}, "kv_cache has rows of 640 bytes but the plan is for 656: .* and kv_row_format"),
        ({"kv_cache": (rows, rows)}, "pass kv_cache alone"),
        ({"kv_cache": rows.bfloat16()}, "bfloat16"),
        ({"kv_cache": rows, "ckv_scale": 1.0}, "those of kv_row_format hold theirs: leave it None"),
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
