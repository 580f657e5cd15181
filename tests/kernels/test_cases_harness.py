"""Tests of the harness: a library built on the reference passes every case, and one with a planted fault fails.

The fake libraries read pages with torch: they show that inputs, comparison and tolerances notice a wrong kernel.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import format_rows
import pytest
import torch
from cases import CASES
from cases.case import Case
from comparison import Mismatch, compare
from harness import Runner
from inputs import Inputs, hidden_tokens, is_ragged, make_inputs, reference_states, scaled
from reference import LOG2_E, Options, State, attention

BY_NAME = {case.name: case for case in CASES}


class Honest:
    """A correct library: it gathers rows from the given pages, and rounds like a kernel."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs, self.case = inputs, inputs.case

    def outputs(self) -> Any:
        made = Runner(self.inputs, "cpu", None).make_outputs()
        begin = 0
        for request, rows in enumerate(self.inputs.q):
            state = self.finished(self.request(request, rows))
            made.out[begin : begin + len(rows)] = state.out.to(made.out.dtype)
            lse = state.lse / LOG2_E if self.case.lse_mode == "basee" else state.lse
            made.lse[begin : begin + len(rows)] = lse.float()
            begin += len(rows)
        return made

    def finished(self, state: State) -> State:
        return scaled(self.case, state)

    def request(self, request: int, q: torch.Tensor) -> State:
        k, v = (self.without_hidden(request, self.rows(request, side)) for side in (0, 1))
        if self.case.entry == "latent":
            k, v = torch.cat([k, v], -1), k  # values, and what keys have in addition
        masks = self.inputs.masks
        return attention(
            q, k, v, self.options(), request=request, custom_mask=None if masks is None else masks[request]
        )

    def options(self) -> Options:
        return self.inputs.options()

    def length(self, request: int) -> int:
        return self.case.kv_lens[request]

    def rows(self, request: int, side: int) -> torch.Tensor:
        """K (side 0) or V (1), as its format stands for it."""
        rows, scales = self.tokens(request, self.inputs.cache.rows()[side]), self.inputs.scale_cache
        if scales is None:
            return rows
        return format_rows.values(self.case, side, rows, self.tokens(request, scales.rows()[side]))

    def tokens(self, request: int, memory: torch.Tensor) -> torch.Tensor:
        length = self.length(request)
        if not is_ragged(self.case):
            pages = self.inputs.indices[self.inputs.indptr[request] : self.inputs.indptr[request + 1]]
            found = memory if memory.dtype is torch.uint8 else memory.float()  # torch 2.9 cannot index fp8 on the CPU
            return found[pages].flatten(0, 1)[:length]
        begin = int(self.inputs.indptr[request])
        return memory[0, begin : begin + length]

    def without_hidden(self, request: int, rows: torch.Tensor) -> torch.Tensor:
        """The batch without tokens that no row sees."""
        hidden = hidden_tokens(self.case, request)
        return torch.cat([torch.zeros_like(rows[:hidden]), rows[hidden:]])


def faulty(change: Callable[[State], State]) -> type[Honest]:
    class Faulty(Honest):
        def request(self, request: int, q: torch.Tensor) -> State:
            return change(super().request(request, q))

    return Faulty


def other_options(**values: Any) -> type[Honest]:
    class Faulty(Honest):
        def options(self) -> Options:
            return dataclasses.replace(super().options(), **values)

    return Faulty


class MissingTail(Honest):
    """Loses the last token of every request."""

    def length(self, request: int) -> int:
        return max(0, super().length(request) - 1)


class PastTheEnd(Honest):
    """Reads one slot too many: NaN, or another request's token."""

    def length(self, request: int) -> int:
        return super().length(request) + 1


class LeftOfTheWindow(Honest):
    """Reads tokens that no row sees, with weight zero."""

    def without_hidden(self, request: int, rows: torch.Tensor) -> torch.Tensor:
        return rows


class NeighbouringScales(Honest):
    """Reads each token's scales at the token before it."""

    def rows(self, request: int, side: int) -> torch.Tensor:
        scales = self.inputs.scale_cache.rows()[side]
        shifted = self.tokens(request, scales).roll(1, 0)
        return format_rows.values(self.case, side, self.tokens(request, self.inputs.cache.rows()[side]), shifted)


class TailsOfOthers(Honest):
    """Reads what keys have in addition to values at the fourth token after a token."""

    def rows(self, request: int, side: int) -> torch.Tensor:
        found = super().rows(request, side)
        return found.roll(-4, 0) if side == 1 else found


class UnscaledOutputs(Honest):
    """Does not divide outputs by their scale."""

    def finished(self, state: State) -> State:
        return state


class LowOutputs(Honest):
    """Rounds outputs of e4m3 as if they were half a step lower."""

    def finished(self, state: State) -> State:
        state = super().finished(state)
        return dataclasses.replace(state, out=state.out * (1 - 2**-4))


def rounded_outputs(dtype: torch.dtype) -> type[Honest]:
    return faulty(lambda state: dataclasses.replace(state, out=state.out.to(dtype).double()))


class WrongHeads(Honest):
    """Assigns query heads to KV heads round-robin instead of in groups."""

    def request(self, request: int, q: torch.Tensor) -> State:
        order = torch.arange(q.shape[1]).reshape(self.case.num_kv_heads, -1).T.flatten()
        state = super().request(request, q[:, order])
        back = torch.argsort(order)
        return State(state.out[:, back], state.lse[:, back], state.magnitude, state.spread)


class ShiftedMask(Honest):
    """Reads a custom mask at an offset of one bit."""

    def request(self, request: int, q: torch.Tensor) -> State:
        shifted = [mask.flatten().roll(1).reshape(mask.shape) for mask in self.inputs.masks]
        honest = Honest(dataclasses.replace(self.inputs, masks=shifted))
        return honest.request(request, q)


class LeftAlignedCausal(Honest):
    """Counts causal from the first token."""

    def request(self, request: int, q: torch.Tensor) -> State:
        tokens = torch.arange(self.length(request))
        rows = torch.arange(len(q)).reshape(-1, 1)
        honest = Honest(dataclasses.replace(self.inputs, masks=None))
        honest.options = lambda: dataclasses.replace(
            self.inputs.options(), causal=False, mask_mod=lambda b, h, q_idx, kv_idx: tokens <= rows
        )
        return honest.request(request, q)


def num_scores(case: Case) -> int:
    """Scores of all heads, masked ones included."""
    q_lens = case.q_lens or (1,) * len(case.kv_lens)
    return case.num_q_heads * sum(q * kv for q, kv in zip(q_lens, case.kv_lens, strict=True))


def _unwritten(state: State) -> State:
    out = state.out.clone()
    if len(out):
        out[-1, -1] = math.nan
    return dataclasses.replace(state, out=out)


def _one_bad_element(state: State) -> State:
    out = state.out.clone()
    if out.numel():
        out[0, 0, -1] += 0.03 * state.magnitude[0, 0, -1] + 1e-3
    return dataclasses.replace(state, out=out)


FAULTS = {
    "missing tail": (MissingTail, "decode-long-among-short"),
    "missing tail of a prompt": (MissingTail, "prefill-squares"),
    "slot past the end": (PastTheEnd, "decode-edges"),
    "tokens left of the window": (LeftOfTheWindow, "few-window-in-page"),
    "scales of the token before": (NeighbouringScales, "format-nvfp4"),
    "tails of other tokens": (TailsOfOthers, "latent-tail"),
    "wrong head mapping": (WrongHeads, "heads-32-8"),
    "lse in base e": (faulty(lambda s: dataclasses.replace(s, lse=s.lse / LOG2_E)), "decode-batch-70"),
    "lse of masked rows finite": (
        faulty(lambda s: dataclasses.replace(s, lse=s.lse.clamp(min=-1e30))),
        "prefill-q-over-kv",
    ),
    "rows never written": (faulty(_unwritten), "ragged-squares"),
    "one element off": (faulty(_one_bad_element), "prefill-mixed"),
    "causal left-aligned": (LeftAlignedCausal, "prefill-append"),
    "causal ignored": (other_options(causal=False), "prefill-squares"),
    "window one too wide": (other_options(window_left=64), "window-63-decode"),
    "window one too narrow": (other_options(window_left=126), "sinks-window"),
    "mask one bit off": (ShiftedMask, "mask-packed-paged"),
    "soft cap ignored": (other_options(soft_cap=0.0), "cap-30"),
    "slopes ignored": (other_options(alibi_slopes=None), "alibi-decode"),
    "sinks ignored": (other_options(sinks=None), "sinks-split"),
    "rope scale ignored": (other_options(rope=(1.0, 5e5)), "rope-scaled"),
    "k scale ignored": (other_options(k_scale=1.0), "scales-float"),
    "v scale by the wrong head": (other_options(v_scale=torch.tensor([0.6, 0.3])), "scales-per_head-decode"),
    "scale of outputs ignored": (UnscaledOutputs, "o8-prefill"),
    "fp32 outputs rounded to bf16": (rounded_outputs(torch.bfloat16), "latent-out-fp32"),
    "fp32 outputs rounded to fp16": (rounded_outputs(torch.float16), "latent-out-fp32-wide"),
    "fp32 outputs of fp32 queries rounded to fp16": (rounded_outputs(torch.float16), "dtype-float32-same"),
    "outputs half a step low": (LowOutputs, "o8-prefill"),
    "variant's mask ignored": (other_options(mask_mod=None), "variant-documents"),
    "scale off by half a percent": (other_options(sm_scale=0.125 * 1.005), "dtype-float32-same"),
}


# test_cases.py runs every row with these inputs, reference and comparison; here every eighth row without millions of
# scores, and the faults' rows.
FAULTY = {row for _, row in FAULTS.values()}
READABLE = [case for case in CASES if not (case.row_format or case.selected)]  # rows of pages that torch can index
HONEST = [case for i, case in enumerate(READABLE) if case.name in FAULTY or (i % 8 == 0 and num_scores(case) < 2**22)]


@pytest.mark.parametrize("case", HONEST, ids=str)
def test_honest_library_passes(case: Case) -> None:
    inputs = make_inputs(case)
    report = compare(case, Honest(inputs).outputs(), reference_states(inputs))
    assert report.row <= 1


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_noticed(name: str) -> None:
    library, case_name = FAULTS[name]
    inputs = make_inputs(BY_NAME[case_name])
    with pytest.raises(Mismatch):
        compare(inputs.case, library(inputs).outputs(), reference_states(inputs))


def test_write_beside_the_output_is_noticed() -> None:
    inputs = make_inputs(BY_NAME["decode-edges"])
    outputs = Honest(inputs).outputs()
    outputs.guards["lse"][-1] = 0
    with pytest.raises(Mismatch, match="memory around lse was written"):
        compare(inputs.case, outputs, reference_states(inputs))
