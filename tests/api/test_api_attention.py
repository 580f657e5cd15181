"""BatchAttention and the POD wrappers against the reference: prefills and decodes in one call."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from cases.case import Case
from comparison import Outputs, compare
from harness import Runner
from inputs import Inputs, make_inputs, pack_bits, reference_states

import flashpage
from flashpage import CapabilityError, PlanError, RunError

pytestmark = pytest.mark.usefixtures("quick_kernels")

WORKSPACE_BYTES = 32 << 20
DECODES = ((1, 70), (1, 0), (1, 200), (1, 16))
PREFILLS = ((130, 150), (65, 65), (90, 300))
BATCHES = {
    "decodes-first": (*DECODES, *PREFILLS),
    "prefills-first": (*PREFILLS, *DECODES),
    "mixed": (DECODES[0], PREFILLS[0], DECODES[1], PREFILLS[1]),
    "decodes": DECODES,
    "prefills": PREFILLS,
    "none": (),
}


def batch_case(lengths: tuple[tuple[int, int], ...], name: str = "batch", **options: Any) -> Case:
    q_lens, kv_lens = zip(*lengths, strict=True) if lengths else ((), ())
    return Case(name, "a batch", kv_lens, q_lens, **({"cache": "fused", "causal": True} | options))


def kv_lens(inputs: Inputs) -> torch.Tensor:
    return torch.tensor(inputs.case.kv_lens, dtype=torch.int32)


def planned(inputs: Inputs, device: str, host_lengths: bool = True, **changed: Any) -> Any:
    case = inputs.case
    wrapper = flashpage.BatchAttention(case.kv_layout, device)
    lengths = [inputs.qo_indptr, inputs.indptr, inputs.indices.to(device), kv_lens(inputs)]
    if not host_lengths:
        lengths = [t.to(device) for t in lengths]
    sizes = (case.num_q_heads, case.num_kv_heads, case.head_dim, case.value_dim, case.page_size)
    options = {"causal": case.causal, "sm_scale": case.sm_scale, "logits_soft_cap": case.soft_cap or None}
    types = {"q_data_type": getattr(torch, case.q_dtype), "kv_data_type": getattr(torch, case.kv_type)}
    wrapper.plan(*lengths, *sizes, **(options | types | changed))
    return wrapper


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kv_layout": "HND", "cache": "tuple", "q_dtype": "float16", "head_dim_vo": 32, "soft_cap": 20.0},
        {"kv_dtype": "float8_e4m3fn", "causal": False, "sm_scale": 0.2},
    ],
    ids=["bf16", "fp16-HND-cap", "e4m3"],
)
def test_batch_attention(name: str, options: dict[str, Any], device: str) -> None:
    inputs = make_inputs(batch_case(BATCHES[name], **options))
    runner = Runner(inputs, device, flashpage)
    wrapper = planned(inputs, device)
    if not inputs.q:
        q = torch.empty(0, 4, 64, dtype=getattr(torch, inputs.case.q_dtype), device=device)
        assert [t.numel() for t in wrapper.run(q, *runner.kv())] == [0, 0]
        return
    q = runner.q()
    out, lse = wrapper.run(q, *runner.kv())
    compare(inputs.case, Outputs(out, lse), reference_states(inputs))
    given = runner.make_outputs()
    found = planned(inputs, device, host_lengths=False).run(q, *runner.kv(), given.out, given.lse)
    assert found[0] is given.out and found[1] is given.lse
    assert torch.equal(given.out, out) and torch.equal(given.lse, lse)
    compare(inputs.case, given, reference_states(inputs))


@pytest.mark.parametrize("logits_soft_cap", [0.0, 9.0])
def test_batch_attention_compiles(logits_soft_cap: float) -> None:
    inputs = make_inputs(batch_case(BATCHES["prefills-first"]))
    runner, wrapper = Runner(inputs, "cpu", flashpage), planned(inputs, "cpu")
    kv = runner.kv()[0]

    def step(q: torch.Tensor) -> Any:
        return wrapper.run(q, kv, logits_soft_cap=logits_soft_cap)

    torch._dynamo.reset()
    found = torch.compile(step, fullgraph=True, backend="aot_eager")(runner.q())
    assert all(torch.equal(x, y) for x, y in zip(found, step(runner.q()), strict=True))


def test_a_soft_cap_at_run() -> None:
    """A soft cap at run replaces the planned one; 0 keeps the planned one. One that no score reaches is none."""
    inputs = make_inputs(batch_case(BATCHES["decodes-first"], soft_cap=9.0))
    runner = Runner(inputs, "cpu", flashpage)
    wrapper = planned(inputs, "cpu", logits_soft_cap=None)
    expected = planned(inputs, "cpu").run(runner.q(), *runner.kv())
    plain = wrapper.run(runner.q(), *runner.kv())
    found = wrapper.run(runner.q(), *runner.kv(), logits_soft_cap=9.0)
    assert torch.equal(found[0], expected[0]) and not torch.equal(found[0], plain[0])
    assert torch.equal(wrapper.run(runner.q(), *runner.kv())[0], plain[0])
    assert torch.equal(wrapper.run(runner.q(), *runner.kv(), logits_soft_cap=3e38)[0], plain[0])


def test_errors_of_batch_attention() -> None:
    inputs = make_inputs(batch_case(BATCHES["decodes-first"]))
    runner, wrapper = Runner(inputs, "cpu", flashpage), flashpage.BatchAttention(device="cpu")
    with pytest.raises(RunError, match="BatchAttention has no plan"):
        wrapper.run(runner.q(), *runner.kv())
    wrapper = planned(inputs, "cpu")
    with pytest.raises(RunError, match="q has 5 rows but the plan is for 289"):
        wrapper.run(runner.q()[:5], *runner.kv())
    with pytest.raises(RunError, match="kv_cache_sf"):
        wrapper.run(runner.q(), *runner.kv(), kv_cache_sf=torch.zeros(1))
    with pytest.raises(RunError, match="plan had no use_profiler"):
        wrapper.run(runner.q(), *runner.kv(), profiler_buffer=torch.zeros(1, dtype=torch.uint64))
    lengths = (torch.tensor([0, 1], dtype=torch.int32),) * 2
    with pytest.raises(PlanError, match="num_kv_heads=0"):
        wrapper.plan(*lengths, torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=torch.int32), 4, 0, 64, 64, 16)
    if not torch.cuda.is_available():
        with pytest.raises(PlanError, match="device='cuda': torch finds no CUDA device"):
            flashpage.BatchAttention()
    short = dataclasses.replace(inputs, indptr=inputs.indptr[:-1])
    with pytest.raises(PlanError, match="^kv_indptr has 7 entries"):
        planned(short, "cpu")
    assert wrapper.float_workspace_buffer.numel() > wrapper.int_workspace_buffer.numel() > 0


# ---------------------------------------------------------------- POD


def prefill_case(lengths: tuple[tuple[int, int], ...] = ((130, 150),), **options: Any) -> Case:
    """A case for the prefill side; ragged if it is one request."""
    options = {"cache": "tuple", "entry": "ragged"} | options if len(lengths) == 1 else options
    return batch_case(lengths, "pod-prefill", **options)


def decode_inputs(**options: Any) -> Inputs:
    return make_inputs(dataclasses.replace(batch_case(DECODES, "pod-decode", **options), entry="decode"))


def plan_pod(wrapper: Any, inputs: Inputs, device: str, **options: Any) -> None:
    case = inputs.case
    pages = (inputs.indptr, inputs.indices.to(device), inputs.last_page_len)
    sizes = (case.num_q_heads, case.num_kv_heads, case.head_dim, case.page_size)
    types = {"q_data_type": getattr(torch, case.q_dtype), "kv_data_type": getattr(torch, case.kv_type)}
    wrapper.plan(*pages, *sizes, **(types | options))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_pod(layout: str, device: str) -> None:
    """A second layer plans nothing; each side has its own options."""
    decode = decode_inputs()
    prefill = make_inputs(prefill_case(kv_layout=layout))
    p, d = Runner(prefill, device, flashpage), Runner(decode, device, flashpage)
    wrapper = flashpage.PODWithPagedKVCacheWrapper(torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device))
    plan_pod(wrapper, decode, device)
    k, v = (t.narrow(0 if layout == "NHD" else 1, 0, 150) for t in p.kv())
    tensors = (p.q(), k, v, d.q(), *d.kv())
    for _ in range(2):
        out_p, out_d = wrapper.run(*tensors, causal_p=True, kv_layout_p=layout)
        compare(prefill.case, Outputs(out_p, None), reference_states(prefill))
        compare(decode.case, Outputs(out_d, None), reference_states(decode))
        planned_once = wrapper._prefills[layout].attention.session.generation
    wrapper.run(*tensors, causal_p=True, kv_layout_p=layout)
    assert wrapper._prefills[layout].attention.session.generation == planned_once
    changed = {"window_left_p": 9, "sm_scale_p": 0.3, "window_left_d": 20, "sm_scale_d": 0.25, "k_scale": 2.0}
    out_p, out_d = wrapper.run(*tensors, causal_p=True, kv_layout_p=layout, **changed)
    case_p = dataclasses.replace(prefill.case, window_left=9, sm_scale=0.3)
    case_d = dataclasses.replace(decode.case, window_left=20, sm_scale=0.5)
    compare(case_p, Outputs(out_p, None), reference_states(dataclasses.replace(prefill, case=case_p)))
    compare(case_d, Outputs(out_d, None), reference_states(dataclasses.replace(decode, case=case_d)))
    again = wrapper.run(*tensors, causal_p=True, kv_layout_p=layout)[1]  # the planned values are used again
    compare(decode.case, Outputs(again, None), reference_states(decode))


@pytest.mark.parametrize("is_packed", [False, True])
def test_pod_masks(is_packed: bool, device: str) -> None:
    """The prefill's mask is read in every layer."""
    decode = decode_inputs()
    wrapper = flashpage.PODWithPagedKVCacheWrapper(torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device))
    plan_pod(wrapper, decode, device)
    d = Runner(decode, device, flashpage)
    for name in ("first", "second-mask"):
        case = dataclasses.replace(prefill_case(mask="dense"), name=name)
        prefill = make_inputs(case)
        p = Runner(prefill, device, flashpage)
        k, v = (t[:150] for t in p.kv())
        mask = {"packed_custom_mask_p": pack_bits(prefill.masks).to(device)} if is_packed else {
            "custom_mask_p": prefill.masks[0].to(device)
        }  # fmt: skip
        out_p, out_d = wrapper.run(p.q(), k, v, d.q(), *d.kv(), causal_p=True, **mask)
        compare(case, Outputs(out_p, None), reference_states(prefill))
        compare(decode.case, Outputs(out_d, None), reference_states(decode))


def test_pod_graph_buffers() -> None:
    decode, size = decode_inputs(), {"dtype": torch.int32}
    buffers = (torch.zeros(5, **size), torch.zeros(64, **size), torch.zeros(4, **size))
    wrapper = flashpage.PODWithPagedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8), "NHD", True, *buffers)
    assert wrapper.is_cuda_graph_enabled
    plan_pod(wrapper, decode, "cpu")
    assert torch.equal(buffers[1][: len(decode.indices)], decode.indices)
    assert wrapper.end_forward() is None


def test_errors_of_pod() -> None:
    decode = decode_inputs()
    d, workspace = Runner(decode, "cpu", flashpage), torch.empty(1 << 20, dtype=torch.uint8)
    wrapper = flashpage.PODWithPagedKVCacheWrapper(workspace)
    rows = torch.randn(3, 4, 64).to(torch.bfloat16)
    tensors = (rows, rows[:, :2], rows[:, :2], d.q(), *d.kv())
    with pytest.raises(RunError, match="no plan"):
        wrapper.run(*tensors)
    plan_pod(wrapper, decode, "cpu")
    for options, error, says in (
        ({"return_lse_d": True}, CapabilityError, "return_lse_d=True"),
        ({"return_lse_p": True}, CapabilityError, "return_lse_p=True"),
        ({"custom_mask_d": torch.ones(1)}, CapabilityError, "custom_mask_d"),
        ({"packed_custom_mask_d": torch.ones(1)}, CapabilityError, "packed_custom_mask_d"),
        ({"use_fp16_qk_reduction": True}, CapabilityError, "use_fp16_qk_reduction"),
        ({"kv_layout_d": "HND"}, RunError, "kv_layout_d='HND' but the wrapper has 'NHD'"),
        ({"kv_layout_p": "NDH"}, RunError, "kv_layout_p='NDH' is unknown"),
    ):
        with pytest.raises(error, match=says):
            wrapper.run(*tensors, **options)
    with pytest.raises(RunError, match="k_p has shape"):
        wrapper.run(rows, rows[0], *tensors[2:])
    with pytest.raises(CapabilityError, match="jit_args"):
        flashpage.PODWithPagedKVCacheWrapper(workspace, jit_args=["variant"])
    wrapper.reset_workspace_buffer(workspace, torch.empty(1 << 20, dtype=torch.uint8))
    with pytest.raises(RunError, match="no plan"):
        wrapper.run(*tensors)


@pytest.mark.parametrize("host_lengths", [True, False])
def test_batch_pod(host_lengths: bool, device: str) -> None:
    decode, prefill = decode_inputs(), make_inputs(prefill_case(PREFILLS))
    p, d = Runner(prefill, device, flashpage), Runner(decode, device, flashpage)
    wrapper = flashpage.BatchPODWithPagedKVCacheWrapper(torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device))
    assert not wrapper.is_cuda_graph_enabled and wrapper.end_forward() is None
    lengths = []
    for inputs in (prefill, decode):
        found = (inputs.qo_indptr, inputs.indptr, inputs.indices.to(device), inputs.last_page_len)
        lengths += found if host_lengths else [t.to(device) for t in found]
    case = decode.case
    sizes = (case.num_q_heads, case.num_kv_heads, case.head_dim, case.page_size)
    wrapper.plan(*lengths, *sizes, q_data_type=torch.bfloat16)
    tensors = (p.q(), *p.kv(), d.q(), *d.kv())
    (out_p, lse_p), (out_d, lse_d) = wrapper.run(*tensors, causal_p=True, return_lse=True)
    compare(prefill.case, Outputs(out_p, lse_p), reference_states(prefill))
    compare(case, Outputs(out_d, lse_d), reference_states(decode))
    masked = make_inputs(prefill_case(PREFILLS, mask="dense"))
    masked = dataclasses.replace(prefill, case=masked.case, masks=masked.masks)
    mask = torch.cat([m.flatten() for m in masked.masks]).to(device)
    out_p, _ = wrapper.run(*tensors, causal_p=True, custom_mask_p=mask, v_scale=2.0)
    compare(masked.case, Outputs(out_p, None), reference_states(masked))
    out_p, _ = wrapper.run(*tensors, packed_custom_mask_p=pack_bits(masked.masks).to(device))
    compare(masked.case, Outputs(out_p, None), reference_states(masked))
    again = wrapper.run(*tensors, causal_p=True)[0]
    compare(prefill.case, Outputs(again, None), reference_states(prefill))


def test_errors_of_batch_pod() -> None:
    wrapper = flashpage.BatchPODWithPagedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8))
    rows = torch.randn(3, 4, 64)
    with pytest.raises(RunError, match="no plan"):
        wrapper.run(rows, rows, rows, rows)
    with pytest.raises(PlanError, match="last_page_len_d=None is not a tensor"):
        wrapper.plan(*(torch.zeros(2, dtype=torch.int32),) * 7, None, 4, 2, 64, 16)
    with pytest.raises(CapabilityError, match="use_fp16_qk_reduction"):
        wrapper.run(rows, rows, rows, rows, use_fp16_qk_reduction=True)
