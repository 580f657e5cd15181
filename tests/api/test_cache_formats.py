"""Caches in formats with scales: appending, engines' layouts, each wrapper's way, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import format_rows
import pytest
import torch
from cases.case import decode, prefill
from comparison import Outputs, compare
from format_pages import LENGTHS, NAMES, Pages, planned_decode
from harness import Runner
from inputs import make_inputs, reference_states

import flashpage
from flashpage import CapabilityError, PlanError, RunError
from flashpage.kernels.kv_formats import FORMATS

DECODE = decode("formats", "the API's forms", (65, 0, 130, 1), head_dim=128, kv_format="nvfp4")


@pytest.mark.parametrize("name", NAMES)
def test_attention_over_what_was_appended(name: str) -> None:
    """Within the error of the format, which for four bits is an eighth of a row."""
    pages = Pages(name, dim=128)
    pages.append()
    q = torch.randn(len(LENGTHS), 4, 128).bfloat16()
    wrapper = planned_decode(pages, kv_format=name)
    found = wrapper.run(q, tuple(pages.cache), kv_cache_sf=tuple(pages.scales)).double()
    ends = torch.tensor([0, *LENGTHS]).cumsum(0)
    for i, row in enumerate(q.double()):
        k, v = (part[ends[i] : ends[i + 1]].double().repeat_interleave(2, 1) for part in (pages.key, pages.value))
        p = (torch.einsum("hd,thd->ht", row, k) * 128**-0.5).softmax(-1)
        exact = torch.einsum("ht,thd->hd", p, v)
        assert float((found[i] - exact).norm() / exact.norm()) < (0.17 if FORMATS[name].bits == 4 else 0.05)


def test_flashinfers_scales_of_tokens() -> None:
    """use_token_head_sf is its name of the format e4m3_token."""
    pages = Pages("e4m3_token", dim=128)
    pages.append()
    q, cache, scales = torch.randn(len(LENGTHS), 4, 128).bfloat16(), tuple(pages.cache), tuple(pages.scales)
    types = {"q_data_type": torch.bfloat16, "kv_data_type": torch.float8_e4m3fn}
    expected = planned_decode(pages, kv_format="e4m3_token").run(q, cache, kv_cache_sf=scales)
    heads = (4, 2, 128, pages.cache[0].shape[1])
    wrapper = flashpage.BatchPrefillWithPagedKVCacheWrapper(torch.empty(16 << 20, dtype=torch.uint8))
    lists = (torch.arange(len(LENGTHS) + 1), pages.indptr, pages.indices, pages.last)
    wrapper.plan(*lists, *heads, use_token_head_sf=True, uniform_q_len=1, **types)
    torch.testing.assert_close(wrapper.run(q, cache, kv_cache_sf=scales), expected)
    wrapper.plan(*lists, *heads, use_token_head_sf=False, **types)
    with pytest.raises(RunError, match="kv_cache_sf"):
        wrapper.run(q, cache, kv_cache_sf=scales)
    with pytest.raises(PlanError, match="use_token_head_sf=True means kv_format='e4m3_token', not 'nvfp4'"):
        wrapper.plan(*lists, *heads, use_token_head_sf=True, kv_format="nvfp4", **types)


def test_vllms_page() -> None:
    """[K data, K scales, V data, V scales] of a page, as strided views."""
    runner = Runner(make_inputs(DECODE), "cpu", flashpage)
    (cache,), scales = runner.kv(), runner.kv_cache_sf()["kv_cache_sf"]
    parts = [cache[0], scales[0].view(torch.uint8), cache[1], scales[1].view(torch.uint8)]
    memory = torch.cat([part.flatten(1) for part in parts], 1)
    views, begin = [], 0
    for part in parts:
        size = part[0].numel()
        views.append(memory[:, begin : begin + size].view(part.shape))
        begin += size
    wrapper = runner.planned()
    found = wrapper.run(
        *(runner.q(), (views[0], views[2])),
        kv_cache_sf=(views[1].view(torch.float8_e4m3fn), views[3]),  # bytes are scales too
    )
    assert torch.equal(found, wrapper.run(runner.q(), cache, kv_cache_sf=scales))


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch has no type of two fp4 numbers")
def test_the_fp4_view() -> None:
    runner = Runner(make_inputs(DECODE), "cpu", flashpage)
    (cache,), scales, wrapper = runner.kv(), runner.kv_cache_sf(), runner.planned()
    expected = wrapper.run(runner.q(), cache, **scales)
    fp4 = torch.float4_e2m1fn_x2
    options = {"q_data_type": torch.bfloat16, "kv_data_type": fp4}
    pages = (runner.inputs.indptr, runner.inputs.indices, runner.inputs.last_page_len)
    wrapper.plan(*pages, 4, 2, 128, 16, **options)
    assert torch.equal(wrapper.run(runner.q(), tuple(part.view(fp4) for part in cache), **scales), expected)


@pytest.mark.parametrize("name", ["nvfp4", "int4_token_rotated", "bfloat16+nvfp4"])
def test_each_wrapper_reads_formats(name: str) -> None:
    """BatchAttention, a cascade, and plans on the device, next to the paged wrapper."""
    case = prefill("formats", "", (1, 17, 5), (130, 17, 69), causal=True, kv_format=name)
    inputs = make_inputs(case)
    runner, options = Runner(inputs, "cpu", flashpage), format_rows.plan_arguments(case)
    (cache,), extra, q = runner.kv(), runner.kv_cache_sf(), runner.q()
    expected, states = runner.planned().run(q, cache, **extra), reference_states(inputs)
    heads, types = (4, 2, 64), {"q_data_type": torch.bfloat16}
    pages = (inputs.qo_indptr, inputs.indptr, inputs.indices)
    mixed = flashpage.BatchAttention(device="cpu")
    mixed.plan(*pages, torch.tensor(case.kv_lens), *heads, 64, 16, causal=True, **types, **options)
    compare(case, Outputs(*mixed.run(q, cache, **extra)), states)
    cascade = flashpage.MultiLevelCascadeAttentionWrapper(1, torch.empty(16 << 20, dtype=torch.uint8))
    cascade.plan(*([part] for part in pages), [inputs.last_page_len], *heads, 16, causal=True, **types, **options)
    assert torch.equal(cascade.run(q, cache, **extra), expected)
    table = torch.zeros(3, 9, dtype=torch.int32)
    for i in range(3):
        mine = inputs.indices[inputs.indptr[i] : inputs.indptr[i + 1]]
        table[i, : len(mine)] = mine
    device = flashpage.BatchPrefillWithPagedKVCacheWrapper(torch.empty(16 << 20, dtype=torch.uint8))
    lens = torch.tensor(case.kv_lens, dtype=torch.int32)
    device.plan_on_device(*(inputs.qo_indptr, lens, table, *heads, 16), max_rows=23, causal=True, **types, **options)
    compare(case, Outputs(*device.run(q, cache, return_lse=True, **extra)), states)


@pytest.mark.parametrize("name", ["nvfp4", "bfloat16+nvfp4"])
def test_runs_with_equal_tensors_are_one_call(name: str) -> None:
    """The builtin compares scales, too: others, none, or those of another place are judged in Python."""
    case = decode("formats", "", (65, 9), kv_format=name)
    runner = Runner(make_inputs(case), "cpu", flashpage)
    (cache,), scales, wrapper = runner.kv(), runner.kv_cache_sf()["kv_cache_sf"], runner.planned()
    q, judged = runner.q(), mock.Mock(side_effect=wrapper._attention._run_judged)
    expected = wrapper.run(q, cache, kv_cache_sf=scales)
    with mock.patch.object(wrapper._attention, "_run_judged", judged):
        assert torch.equal(wrapper.run(q, cache, kv_cache_sf=scales), expected) and not judged.called
        others = tuple(None if part is None else torch.zeros_like(part) for part in scales)
        assert not torch.equal(wrapper.run(q, cache, kv_cache_sf=others), expected) and not judged.called
        moved = (scales[0], torch.cat([scales[1], scales[1]], -1)[..., :4])
        assert torch.equal(wrapper.run(q, cache, kv_cache_sf=moved), expected) and judged.called
        with pytest.raises(RunError, match="kv_cache_sf has no scales of [KV]"):
            wrapper.run(q, cache)


def _on_sixteen(wrapper: Any, monkeypatch: pytest.MonkeyPatch, on_eight: Any) -> None:
    """Gives the plan's kernel the alignment of a card's."""
    prepared = wrapper._attention.session.active[0].prepared
    kernel = dataclasses.replace(prepared.choice.kernel, row_alignment=16, on_eight=on_eight)
    monkeypatch.setattr(prepared, "choice", dataclasses.replace(prepared.choice, kernel=kernel))


def _placed(part: torch.Tensor, start: int, row_bytes: int) -> torch.Tensor:
    """A copy of a tensor of bytes that starts `start` bytes after a multiple of 16."""
    memory = torch.zeros(16 + part[..., 0].numel() * row_bytes, dtype=torch.uint8)[start : start - 16]
    return memory.view(*part.shape[:-1], row_bytes)[..., : part.shape[-1]].copy_(part)


@pytest.mark.parametrize(
    "places", [((0, 64), (8, 64)), ((8, 72), (0, 64)), ((0, 80), (8, 72)), ((8, 64), (8, 64))], ids=str
)
def test_rows_that_start_on_eight_bytes(places: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The start and the bytes from row to row of K and of V: scales may follow each row, or all of K's."""
    pages, q = Pages("nvfp4", dim=128), torch.randn(len(LENGTHS), 4, 128).bfloat16()
    pages.append()
    scales, cache = tuple(pages.scales), tuple(map(_placed, pages.cache, *zip(*places, strict=True)))
    wrapper = planned_decode(pages, kv_format="nvfp4")
    expected = wrapper.run(q, tuple(pages.cache), kv_cache_sf=scales)
    wrapper = planned_decode(pages, kv_format="nvfp4")
    _on_sixteen(wrapper, monkeypatch, lambda spec: spec)
    for tensors in (tuple(pages.cache), cache, cache, tuple(pages.cache)):
        assert torch.equal(wrapper.run(q, tensors, kv_cache_sf=scales), expected)
    for i, name in enumerate("KV"):
        odd = [*pages.cache]
        odd[i] = _placed(odd[i], 4, 64)
        with pytest.raises(RunError, match=f"{name} starts at .* rows that start on 8 bytes"):
            wrapper.run(q, tuple(odd), kv_cache_sf=scales)
    with pytest.raises(RunError, match="q starts at .* rows that start on 16 bytes"):
        wrapper.run(torch.zeros(q.numel() + 4, dtype=q.dtype)[4:].view(q.shape), cache, kv_cache_sf=scales)
    wrapper = planned_decode(pages, kv_format="nvfp4")
    _on_sixteen(wrapper, monkeypatch, lambda spec: None)  # as with boxes
    with pytest.raises(RunError, match="on 16 bytes"):
        wrapper.run(q, cache, kv_cache_sf=scales)
    assert torch.equal(wrapper.run(q, tuple(pages.cache), kv_cache_sf=scales), expected)
    with pytest.raises(RunError, match="on 16 bytes"):
        wrapper.run(q, cache, kv_cache_sf=scales)


def test_rows_of_72_bytes_start_on_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    """V follows K of one head and token in fp8 of 72 columns; rows of q in 16 bits start on 16 bytes."""
    cache, q = torch.randn(3, 2, 1, 1, 72).to(torch.float8_e4m3fn), torch.randn(1, 2, 72).bfloat16()
    wrapper = flashpage.BatchDecodeWithPagedKVCacheWrapper(torch.empty(16 << 20, dtype=torch.uint8))
    lists = (torch.tensor(numbers) for numbers in ([0, 3], [0, 2, 1], [1]))
    wrapper.plan(*lists, 2, 1, 72, 1, q_data_type=q.dtype, kv_data_type=cache.dtype)
    expected = wrapper.run(q, cache)
    wrapper._attention._local.bound = None
    wrapper._attention._local.bindings.clear()
    _on_sixteen(wrapper, monkeypatch, lambda spec: None)
    assert torch.equal(wrapper.run(q, cache), expected)
    with pytest.raises(RunError, match="q starts at .* on 16 bytes"):
        wrapper.run(torch.zeros(148, dtype=q.dtype)[4:].view(q.shape), cache)


@pytest.mark.parametrize("name", ["nvfp4", "bfloat16+nvfp4", "int4_token_rotated"])
def test_compiled_runs(name: str) -> None:
    runner = Runner(make_inputs(decode("formats", "", (65, 9), kv_format=name)), "cpu", flashpage)
    (cache,), scales, wrapper, q = runner.kv(), runner.kv_cache_sf()["kv_cache_sf"], runner.planned(), runner.q()

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        return wrapper.run(q, (k, v), kv_cache_sf=(given[0] if len(given) == 2 else None, given[-1]))

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    found = compiled(q, *cache, *(part for part in scales if part is not None))
    assert torch.equal(found, wrapper.run(q, cache, kv_cache_sf=scales))


def test_two_levels_of_a_cascade() -> None:
    """A shared prefix in nvfp4: levels are merged."""
    pages = Pages("nvfp4")
    pages.append()
    q, ends = torch.randn(3, 4, 64).bfloat16(), torch.tensor([0, 1, 2, 3], dtype=torch.int32)
    own = torch.tensor([0, 1, 3, 5], dtype=torch.int32)
    shared = torch.tensor([0, 3], dtype=torch.int32)
    wrapper = flashpage.MultiLevelCascadeAttentionWrapper(2, torch.empty(16 << 20, dtype=torch.uint8))
    last = (torch.tensor([16], dtype=torch.int32), torch.tensor([8, 9, 6], dtype=torch.int32))
    shared_pages, own_pages = pages.indices[:2], pages.indices[3:8]
    wrapper.plan(
        [shared, ends], [torch.tensor([0, 2], dtype=torch.int32), own], [shared_pages, own_pages], last, 4, 2, 64, 16,
        q_data_type=torch.bfloat16, kv_data_type=torch.uint8,
    )  # fmt: skip
    sf = tuple(pages.scales)
    found = wrapper.run(q, tuple(pages.cache), kv_cache_sf=sf, k_scale=1.5, v_scale=0.5)
    flat = flashpage.BatchDecodeWithPagedKVCacheWrapper(torch.empty(16 << 20, dtype=torch.uint8))
    joined = [torch.cat([shared_pages, own_pages[own[i] : own[i + 1]]]) for i in range(3)]
    indptr = torch.tensor([0, *map(len, joined)]).cumsum(0).int()
    flat.plan(indptr, torch.cat(joined), last[1], 4, 2, 64, 16, q_data_type=torch.bfloat16, kv_data_type=torch.uint8)
    expected = flat.run(q, tuple(pages.cache), kv_cache_sf=sf, k_scale=1.5, v_scale=0.5)
    assert torch.allclose(found.float(), expected.float(), atol=2e-2)


@pytest.mark.parametrize("shapes", [((4, 2), (4, 1), (4, 4)), ((2,), (4, 2), (4, 1)), ((1,), (1,), (4, 4))])
def test_scales_of_requests(shapes: tuple[tuple[int, ...], ...]) -> None:
    """Scales of K, V and q: for each request and head, for each request, for each head."""
    case = decode("scales", "", (65, 20, 130, 1), kv_dtype="float8_e4m3fn", scales="tensor")
    inputs = make_inputs(case)
    torch.manual_seed(3)
    k, v, q = (torch.rand(shape) + 0.5 for shape in shapes)
    runner = Runner(inputs, "cpu", flashpage)
    wrapper = runner.planned()
    found = wrapper.run(runner.q(), *runner.kv(), k_scale=k, v_scale=v, q_scale=q, return_lse=True)
    by_request = dataclasses.replace(inputs, scales={"k_scale": k, "v_scale": v, "q_scale": q})
    compare(case, Outputs(*found), reference_states(by_request))
    far = torch.empty(3 * 2**30 + 1).as_strided((4, 1), (2**30, 1))  # nothing touches its 12 GiB
    with pytest.raises(RunError, match="elements from one request's scales"):
        wrapper.run(runner.q(), *runner.kv(), k_scale=far)


REFUSED_PLANS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "unknown": ({"kv_format": "int5"}, PlanError, "kv_format='int5' is unknown: pass 'nvfp4', 'e4m3_token'"),
    "one of two": ({"kv_format": ("nvfp4", "uint8")}, PlanError, r"kv_format\[1\]='uint8' is unknown"),
    "none": ({"kv_format": (None, None)}, PlanError, "names no format: leave it None"),
    "as a type": ({"kv_data_type": "nvfp4"}, PlanError, "is a format: pass kv_format='nvfp4'"),
    "three": ({"kv_format": ("nvfp4",) * 3}, PlanError, "kv_format has 3 entries"),
    "plain": ({"kv_format": "float16"}, PlanError, "is an element type: pass it as kv_data_type"),
    "rotated-v": ({"kv_format": ("nvfp4", "int4_token_rotated")}, PlanError, "rows of V are not rotated"),
    "other-type": (
        {"kv_format": "int8_token", "kv_data_type": torch.uint8},
        PlanError,
        "is not how kv_format=.* is stored .int8, int8.: leave kv_data_type None",
    ),
    "int8": ({"kv_data_type": torch.int8}, PlanError, "has no scales of its own: pass kv_format='int8_token'"),
    "columns": ({"kv_data_type": torch.uint8, "head_dim": 72}, PlanError, "head_dim=72 is not a multiple of 16"),
    "not-a-power": (
        {"kv_format": "int4_token_rotated", "head_dim": 96},
        PlanError,
        "head_dim=96 is not a power of two, as rows of int4_token_rotated must be",
    ),
    "fp8-query": (
        {"kv_format": "int4_token_rotated", "q_data_type": "float8_e4m3fn"},
        PlanError,
        "rotates queries, .*: pass q_data_type=torch.bfloat16, or kv_format='int4_token'",
    ),
    "rope": (
        {"kv_format": "int4_token_rotated", "pos_encoding_mode": "ROPE_LLAMA"},
        CapabilityError,
        "no in-kernel RoPE .* over kv_format int4_token_rotated: apply it to q and K before, or pass 'int4_token'$",
    ),
}


@pytest.mark.parametrize("given", REFUSED_PLANS.values(), ids=REFUSED_PLANS)
def test_plans_that_are_refused(given: tuple[dict[str, Any], type[Exception], str]) -> None:
    options, error, says = given
    pages = Pages("nvfp4", dim=options.get("head_dim", 64))
    options = {name: value for name, value in options.items() if name != "head_dim"}
    with pytest.raises(error, match=says):
        planned_decode(pages, **options)


def shared_output() -> dict[str, Any]:
    out = torch.zeros(4, 4, 64).bfloat16()
    scales = out.view(torch.uint8).view(-1)[:1280].view(torch.float8_e4m3fn).view(10, 16, 2, 4)
    return {"out": out, "kv_cache_sf": (scales, scales.clone())}


REFUSED_RUNS: dict[str, tuple[Any, str]] = {
    "no scales": (lambda p: {"kv_cache_sf": None}, "kv_cache_sf has no scales of K but the plan's kv_format is nvfp4"),
    "one half": (lambda p: {"kv_cache_sf": (p.scales[0], None)}, "kv_cache_sf has no scales of V"),
    "three": (lambda p: {"kv_cache_sf": [p.scales[0]] * 3}, "kv_cache_sf has 3 entries"),
    "a number": (lambda p: {"kv_cache_sf": 2.0}, "kv_cache_sf=2.0 is not a tensor"),
    "type": (lambda p: {"kv_cache_sf": [p.scales[0].float()] * 2}, r"kv_cache_sf\[0\] has dtype torch.float32"),
    "columns": (lambda p: {"kv_cache_sf": [p.scales[0][..., :2]] * 2}, r"pass \(10, 16, 2, 4\)"),
    "pages": (lambda p: {"kv_cache_sf": [p.scales[0][:-1]] * 2}, r"kv_cache_sf\[0\] has shape \(9, 16, 2, 4\)"),
    "dimensions": (lambda p: {"kv_cache_sf": [p.scales[0][0]] * 2}, "kv_cache_sf.0. has .*|which does not fit"),
    "strides": (
        lambda p: {"kv_cache_sf": [torch.zeros(10, 16, 2, 8, dtype=torch.float8_e4m3fn)[..., ::2]] * 2},
        "the innermost stride must be 1",
    ),
    "not packed": (
        lambda p: {"paged_kv_cache": [torch.zeros(10, 16, 2, 64, dtype=torch.uint8)] * 2},
        "k has rows of 64 uint8 but head_dim 64 in nvfp4 takes 32 .two numbers a byte.: pass packed rows",
    ),
    "k_scale": (
        lambda p: {"k_scale": torch.ones(3)},
        r"k_scale has shape \(3,\): pass one entry, or \[2\] .one a head.",
    ),
    "k_scale strides": (lambda p: {"k_scale": torch.ones(4)[::2]}, r"k_scale has strides \(2,\): pass k_scale.contig"),
    "cache type": (lambda p: {"paged_kv_cache": [p.cache[0].view(torch.int8)] * 2}, "k has dtype torch.int8"),
    "one tensor": (lambda p: {"paged_kv_cache": p.cache[0]}, r"pass \[pages, 2, ...\], or a pair"),
    "written": (lambda p: shared_output(), "out shares memory with kv_cache_sf.0."),
}


@pytest.mark.parametrize("given", REFUSED_RUNS.values(), ids=REFUSED_RUNS)
def test_runs_that_are_refused(given: tuple[Any, str]) -> None:
    make, says = given
    pages = Pages("nvfp4")
    wrapper = planned_decode(pages, kv_data_type=torch.uint8)
    arguments = {"paged_kv_cache": pages.cache, "kv_cache_sf": pages.scales} | make(pages)
    with pytest.raises(RunError, match=says):
        wrapper.run(torch.randn(4, 4, 64).bfloat16(), **arguments)


def test_scales_without_a_format() -> None:
    pages = Pages("nvfp4")
    wrapper = planned_decode(pages)
    cache = torch.zeros(pages.pages, 2, 16, 2, 64).bfloat16()
    with pytest.raises(RunError, match="kv_cache_sf is given but the plan is for torch.bfloat16"):
        wrapper.run(torch.randn(4, 4, 64).bfloat16(), cache, kv_cache_sf=pages.scales)
    mixed = planned_decode(pages, kv_format=("bfloat16", "nvfp4"))
    with pytest.raises(RunError, match=r"kv_cache_sf\[0\] is given but bfloat16 has no scales of its own"):
        mixed.run(torch.randn(4, 4, 64).bfloat16(), (cache[:, 0], pages.cache[1]), kv_cache_sf=pages.scales)


@pytest.mark.parametrize(
    "kind, says",
    [
        (torch.uint8, "pass kv_format='nvfp4' to plan, and kv_cache_sf"),
        (torch.int8, "pass kv_format='int8_token' to plan, and kv_cache_sf"),
        (torch.int16, "pass one of float32, float16, bfloat16"),
        (torch.float32, "pass kv_data_type=torch.float32 to plan"),
    ],
)
def test_a_cache_of_another_type(kind: torch.dtype, says: str) -> None:
    wrapper = planned_decode(Pages("nvfp4"))
    with pytest.raises(RunError, match=says):
        wrapper.run(torch.randn(4, 4, 64).bfloat16(), torch.zeros(10, 2, 16, 2, 64, dtype=kind))
    with pytest.raises(RunError, match="pass one of float32|pass q_data_type=torch.float32 to plan"):
        wrapper.run(torch.zeros(4, 4, 64, dtype=kind), torch.zeros(10, 2, 16, 2, 64).bfloat16())


def test_bytes_without_a_format() -> None:
    k = torch.zeros(9, 2, 64, dtype=torch.int8)
    with pytest.raises(RunError, match="or kv_format='int8_token' with kv_cache_sf"):
        flashpage.single_decode_with_kv_cache(torch.randn(4, 64).bfloat16(), k, k)


def test_kernels_of_cards_say_why_they_take_no_format() -> None:
    """The rule that kernels without formats share."""
    from flashpage.kernels.kernel import no_kv_formats
    from flashpage.kernels.options import check_options
    from flashpage.kernels.work import Problem, Work

    options = check_options(
        kv_source="paged", num_qo_heads=4, num_kv_heads=2, head_dim_qk=128, head_dim_vo=None, page_size=16,
        q_data_type="bfloat16", kv_data_type=None, o_data_type=None, causal=False, window_left=-1, logits_soft_cap=None,
        pos_encoding_mode="NONE", has_mask=False, variant=None, fixed_split_size=None, disable_split_kv=False,
        kv_format=("nvfp4", "int8_token"),
    )  # fmt: skip
    reason = no_kv_formats(Work(Problem(options, 1), None))  # type: ignore[arg-type]
    assert reason == "it reads K and V of one element type, and no kv_format nvfp4, int8_token"


def test_data_type_is_the_cache_s() -> None:
    """A uint8 data_type is of the cache alone; q keeps its own or fp16."""
    pages = Pages("nvfp4")
    pages.append()
    wrapper = flashpage.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8))
    for given, q_type in (({}, torch.float16), ({"q_data_type": torch.bfloat16}, torch.bfloat16)):
        lists = (pages.indptr, pages.indices, pages.last)
        wrapper.plan(*lists, 4, 2, 64, pages.page, data_type=torch.uint8, **given)
        q = torch.randn(len(LENGTHS), 4, 64).to(q_type)
        assert wrapper.run(q, pages.cache, kv_cache_sf=pages.scales).dtype == q_type
