"""Values of odd types and sizes as arguments of plan and run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from odd_tensors import planned
from wrong_arguments import DIM, HEADS, KINDS, KV_HEADS, decode_plan, decode_run, ints, workspace

import flashpage
from flashpage import PlanError, RunError, jit, native

pytestmark = pytest.mark.usefixtures("quick_kernels")


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        *(("sm_scale", value) for value in (1e39, float("inf"), float("nan"), 1e-50, "1", True, torch.ones(1), None)),
        *(("logits_soft_cap", value) for value in (1e39, 1e-45, "30", torch.ones(2))),
        *(("rope_scale", value) for value in (1e39, 0, -1.0, 1e-46)),
        *(("rope_theta", value) for value in (1e300, 0, float("inf"))),
        *(("causal", value) for value in ("False", torch.tensor(True), 2, [], 0.5)),
        *(("disable_split_kv", value) for value in ("no", torch.tensor(True))),
        *(("non_blocking", value) for value in ("False", torch.tensor(False), 3)),
        *(("window_left", value) for value in (1.5, "3", torch.tensor([3, 4]), True, 2**40)),
        *(("num_qo_heads", value) for value in (True, torch.tensor(8), 2**31)),
        *(("kv_data_type", value) for value in ([torch.float32], list(range(100000)))),
        *(("pos_encoding_mode", value) for value in (["NONE"], b"NONE")),
    ],
)
def test_a_plan_refuses_odd_values(argument: str, value: Any) -> None:
    if value is None:
        assert planned("prefill", **{argument: value}) is not None
        return
    wrapper = planned("prefill")
    for _ in range(2):  # also directly after a plan with other arguments
        with pytest.raises(PlanError, match=argument) as caught:
            wrapper.plan(**(KINDS["prefill"][1]() | {argument: value}))
        assert len(str(caught.value)) < 300
        assert not wrapper._planner.is_planned, "a run would read the older plan"
    wrapper.plan(**KINDS["prefill"][1]())


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        *(("return_lse", value) for value in ("False", torch.tensor(False), 2, None)),
        *(("window_left", value) for value in (1.5, "3", torch.tensor([3, 4]), True)),
        *(("enable_pdl", value) for value in ("no", torch.tensor(True))),
        *(("k_scale", value) for value in (float("nan"), 1e39, "1", torch.tensor(float("inf")), 1e-46)),
        ("v_scale", torch._neg_view(torch.ones(KV_HEADS))),
        ("q_scale", torch.ones(HEADS, requires_grad=True)),
        ("sinks", torch._neg_view(torch.ones(HEADS))),
        ("sinks", torch.ones(HEADS).to("meta")),
    ],
)
def test_a_run_refuses_odd_values(argument: str, value: Any) -> None:
    wrapper = planned()
    for _ in range(2):
        with pytest.raises((RunError, PlanError), match=argument):
            wrapper.run(**decode_run(), **{argument: value})
        wrapper.run(**decode_run())


def test_products_of_scales_fit_fp32() -> None:
    with pytest.raises(RunError, match=r"sm_scale \* q_scale \* k_scale"):
        planned(sm_scale=1e20).run(**decode_run(), q_scale=1e20, k_scale=1.0)


@pytest.mark.parametrize("value", [True, False, 1, 0, np.True_, np.False_])
def test_flags_of_all_kinds(value: Any) -> None:
    wrapper = planned("prefill", causal=value, disable_split_kv=value, non_blocking=value)
    assert wrapper._planner.options.causal is bool(value)
    assert isinstance(wrapper.run(**KINDS["prefill"][2](), return_lse=value), tuple) is bool(value)


def test_a_window_that_no_context_fills_is_none() -> None:
    wrapper, run = planned(), decode_run()
    expected = wrapper.run(**run)
    for window in (2**30, 2**31 - 1, -1, -5):
        assert torch.equal(wrapper.run(**run, window_left=window), expected)
    assert len(wrapper._planner.active) == 1


def test_the_bias_of_alibi_is_flashinfers_on_request() -> None:
    """The documented variant: FlashInfer counts rows from 0, also if tokens precede them in the cache."""
    q, k, v, cap = torch.randn(3, HEADS, DIM), torch.randn(9, KV_HEADS, DIM), torch.randn(9, KV_HEADS, DIM), 2.0
    tensors = {"slopes": flashpage.utils.get_alibi_slopes(HEADS), "before": ints(9 - 3)}
    bias = "score + slopes(h) * to_float(kv_idx - q_idx + before(b))"
    scores = torch.einsum("rhd,khd->hrk", q, k.repeat_interleave(2, 1)) * DIM**-0.5
    scores += tensors["slopes"][:, None, None] * (torch.arange(9) - torch.arange(3)[:, None])
    for logit, expected in ((bias, scores), (f"cap * tanh(({bias}) / cap)", cap * torch.tanh(scores / cap))):
        variant = flashpage.Variant(logit=logit, tensors=tensors, scalars={"cap": cap} if "cap" in logit else {})
        out, lse = flashpage.single_prefill_with_kv_cache(q, k, v, return_lse=True, variant=variant)
        wanted = torch.einsum("hrk,khd->rhd", expected.softmax(-1), v.repeat_interleave(2, 1))
        torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(lse.T, expected.logsumexp(-1) / torch.log(torch.tensor(2.0)), rtol=1e-4, atol=1e-4)
    ours, _our_lse = flashpage.single_prefill_with_kv_cache(q, k, v, return_lse=True, pos_encoding_mode="ALIBI")
    wanted = torch.einsum("hrk,khd->rhd", scores.softmax(-1), v.repeat_interleave(2, 1))
    torch.testing.assert_close(
        ours, wanted, rtol=1e-4, atol=1e-4
    )  # they differ by a constant for each row, so outputs are equal


def test_messages_are_short() -> None:
    numbers = list(range(200_000))
    for name, arguments in (
        ("plan", decode_plan() | {"indptr": numbers}),
        ("plan", decode_plan() | {"indices": numbers}),
    ):
        with pytest.raises(PlanError, match="list of 200000 entries") as caught:
            getattr(planned(), name)(**arguments)
        assert len(str(caught.value)) < 200
    with pytest.raises(RunError, match="list of 200000 entries") as caught:
        planned().run(numbers, decode_run()["paged_kv_cache"])
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("mask", "says"),
    [
        ({"custom_mask": torch.ones(16)}, "custom_mask has 16 values of torch.float32"),
        ({"custom_mask": torch.ones(15).bool()}, "custom_mask has 15 values"),
        ({"packed_custom_mask": torch.ones(2)}, "packed_custom_mask has 2 values of torch.float32"),
        ({"packed_custom_mask": torch.ones(1).byte()}, "packed_custom_mask has 1 values"),
        ({"custom_mask": "all"}, "custom_mask='all'"),
    ],
)
def test_a_mask_is_judged_before_a_kernel_is_made_for_it(
    monkeypatch: pytest.MonkeyPatch, mask: dict[str, Any], says: str
) -> None:
    """A compile takes up to a minute."""
    made: list[Any] = []
    monkeypatch.setattr(jit, "get_kernel", lambda *arguments: made.append(arguments))
    wrapper = flashpage.BatchPrefillWithPagedKVCacheWrapper(workspace())
    lengths = [torch.tensor(numbers, dtype=torch.int32) for numbers in ([0, 4], [0, 1], [0], [4])]
    with pytest.raises(PlanError, match=says):
        wrapper.plan(*lengths, 1, 1, 64, 16, q_data_type=torch.float32, **mask)
    assert not made


def test_fixed_split_sizes_beyond_any_context_never_cut() -> None:
    sizes = (2**26, 2**27, 2**28, 2**28 + 1, 2**31 - 1)
    pieces = {planned(fixed_split_size=size)._planner.options.fixed_piece_tokens for size in sizes}
    assert pieces == {-1}


@pytest.mark.parametrize(("field", "value"), [("page_size", 2**31), ("batch", -(2**31) - 1), ("page_size", 2**32)])
def test_fields_of_32_bits_refuse_more(field: str, value: int) -> None:
    struct = native.Tables()
    setattr(struct, field, 2**31 - 1)
    with pytest.raises(AssertionError, match=f"Tables.{field}={value} does not fit"):
        setattr(struct, field, value)
    assert getattr(struct, field) == 2**31 - 1
    with pytest.raises(AssertionError):
        native.Tables(**{field: value})
    with pytest.raises((AssertionError, TypeError, Exception)):
        native.load().fp_cpu_set_threads(2**32)
