"""Wrappers with the shared prefix in separate tensors, compared with the reference on all tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from cases.case import Case
from comparison import Outputs, compare
from inputs import Inputs, make_inputs
from reference import attention

import flashpage
from flashpage import CapabilityError, PlanError, RunError

pytestmark = pytest.mark.usefixtures("quick_kernels")

WORKSPACE_BYTES = 32 << 20
DECODE_LENS = (70, 0, 16, 1, 129)
PREFILL = ((17, 17), (20, 65), (0, 3), (3, 40))


def case(rows: tuple[int, ...], lens: tuple[int, ...], **options: Any) -> Case:
    return Case(f"prefix-{rows}-{lens}", "tokens after a shared prefix", lens, rows, **({"cache": "fused"} | options))


def decode_case(**options: Any) -> Case:
    return case((1,) * len(DECODE_LENS), DECODE_LENS, **options)


def prefill_case(**options: Any) -> Case:
    return case(*zip(*PREFILL, strict=True), **options)


class Prefix:
    """The batch of a case, after a shared prefix."""

    def __init__(self, given: Case, prefix_len: int, device: str) -> None:
        self.inputs: Inputs = make_inputs(given)
        generator = torch.Generator().manual_seed(prefix_len)
        shape = (prefix_len, given.num_kv_heads, given.head_dim)
        self.k, self.v = (torch.randn(shape, generator=generator).to(getattr(torch, given.kv_type)) for _ in range(2))
        self.case, self.device = given, device
        self.q, self.cache = torch.cat(self.inputs.q).to(device), self.inputs.cache.argument(device)

    def wrapper(self) -> Any:
        kind = "Decode" if set(self.case.q_lens) == {1} else "Prefill"
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
        return getattr(flashpage, f"Batch{kind}WithSharedPrefixPagedKVCacheWrapper")(workspace, self.case.kv_layout)

    def begin(self, wrapper: Any, **options: Any) -> None:
        inputs, sizes = self.inputs, (self.case.num_q_heads, self.case.num_kv_heads, self.case.head_dim)
        pages = (inputs.indptr, inputs.indices.to(self.device), inputs.last_page_len)
        rows = () if "Decode" in type(wrapper).__name__ else (inputs.qo_indptr,)
        wrapper.begin_forward(*rows, *pages, *sizes, self.case.page_size, **options)

    def forward(self, wrapper: Any, **options: Any) -> torch.Tensor:
        k, v = (t.to(self.device) if self.case.kv_layout == "NHD" else t.to(self.device).transpose(0, 1).contiguous()
                for t in (self.k, self.v))  # fmt: skip
        return wrapper.forward(self.q, k, v, self.cache, **options)

    def check(self, out: torch.Tensor) -> None:
        """Compares a run with the reference; causal and sm_scale are the case's."""
        inputs, options = self.inputs, self.inputs.options()
        states = []
        for q, k, v in zip(inputs.q, inputs.k, inputs.v, strict=True):
            state = attention(q, torch.cat([self.k, k]), torch.cat([self.v, v]), options)
            # The outputs of prefix and rest were each rounded once before the merge.
            states.append(dataclasses.replace(state, magnitude=state.magnitude * 1.7, spread=state.spread * 1.7))
        lens = tuple(n + len(self.k) for n in self.case.kv_lens)
        compare(dataclasses.replace(self.case, kv_lens=lens), Outputs(out, None), states)


@pytest.mark.parametrize("prefix_len", [0, 1, 300])
@pytest.mark.parametrize(
    "given",
    [
        decode_case(),
        decode_case(kv_layout="HND", cache="tuple", q_dtype="float16"),
        decode_case(kv_dtype="float8_e4m3fn"),
        prefill_case(causal=True, sm_scale=0.2),
        prefill_case(kv_layout="HND", q_dtype="float16", head_dim=128, num_q_heads=8),
        case((1, 1, 1), (0, 0, 0)),
    ],
    ids=lambda c: f"{c.q_lens}-{c.kv_layout}-{c.kv_type}",
)
def test_results(given: Case, prefix_len: int, device: str) -> None:
    """forward uses the types of its tensors, whether or not begin_forward got them."""
    prefix = Prefix(given, prefix_len, device)
    wrapper = prefix.wrapper()
    is_decode = "Decode" in type(wrapper).__name__
    options = {} if is_decode else {"causal": given.causal, "sm_scale": given.sm_scale}
    prefix.begin(wrapper)
    prefix.check(prefix.forward(wrapper, **options))
    prefix.begin(wrapper, **({"data_type": given.kv_type} if is_decode else {}))
    prefix.check(prefix.forward(wrapper, **options))
    prefix.check(prefix.forward(wrapper, **options))


def test_lengths_may_be_overwritten() -> None:
    """The caller may overwrite its lengths: planning again for other types does not read them."""
    prefix = Prefix(prefill_case(causal=True), 40, "cpu")
    wrapper = prefix.wrapper()
    prefix.begin(wrapper)
    for lengths in (prefix.inputs.indptr, prefix.inputs.last_page_len, prefix.inputs.qo_indptr):
        lengths.zero_()
    prefix.check(prefix.forward(wrapper, causal=True))


def test_the_prefix_may_change() -> None:
    first, second = Prefix(decode_case(), 40, "cpu"), Prefix(decode_case(), 77, "cpu")
    wrapper = first.wrapper()
    first.begin(wrapper, data_type="bfloat16")
    for prefix in (first, second, first):
        prefix.check(prefix.forward(wrapper))
    assert wrapper.end_forward() is None


def test_errors() -> None:
    prefix = Prefix(prefill_case(), 40, "cpu")
    wrapper = prefix.wrapper()
    with pytest.raises(RunError, match=r"no plan: call begin_forward"):
        prefix.forward(wrapper)
    prefix.begin(wrapper)
    with pytest.raises(CapabilityError, match=r"rope_theta=10000.0 is not supported"):
        prefix.forward(wrapper, rope_theta=1e4)
    with pytest.raises(CapabilityError, match=r"use_fp16_qk_reduction=True"):
        prefix.forward(wrapper, use_fp16_qk_reduction=True)
    with pytest.raises(RunError, match=r"k_shared has shape \(40,\)"):
        wrapper.forward(prefix.q, prefix.k[:, 0, 0], prefix.v, prefix.cache)
    with pytest.raises(PlanError, match=r"paged_kv_last_page_len has 3 entries"):
        prefix.inputs = dataclasses.replace(prefix.inputs, last_page_len=prefix.inputs.last_page_len[:3])
        prefix.begin(wrapper)
    with pytest.raises(RunError, match=r"no plan"):
        prefix.forward(wrapper)
    unique = Prefix(decode_case(), 40, "cpu").wrapper()
    for wanted, name in ((prefix.wrapper(), "qo_indptr"), (unique, "unique_kv_indptr")):
        with pytest.raises(PlanError, match=f"^{name}=None is not a tensor"):
            wanted.begin_forward(*(None,) * (4 if name == "qo_indptr" else 3), 4, 2, 64, 16)
    workspaces = [torch.empty(1 << 20, dtype=torch.uint8) for _ in range(2)]
    wrapper.reset_workspace_buffer(*workspaces)
    with pytest.raises(RunError, match=r"no plan"):
        prefix.forward(wrapper)
