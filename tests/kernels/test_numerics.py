"""The numerical contract of docs/numerics.md: repeatable bits, batch invariance, 64-bit offsets, forms of indices."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import REDUCED
from cases.case import MIXED_KV, MIXED_Q, Case, decode, prefill
from cases.latent import latent_case
from comparison import Outputs, compare
from harness import Runner, run_case
from inputs import assemble, make_inputs, one_request, reference_states
from reference import merge
from tolerance import UNIT

import flashpage

REPEATED = [
    decode("repeat-decode", "split and merged", (3000, 7, 0, 64)),
    prefill("repeat-paged", "mixed rows, split", (1, 40, 5), (2000, 40, 900), causal=True),
    prefill("repeat-ragged", "prompts", (70, 40, 5), (70, 40, 300), entry="ragged", causal=True),
]
# Lengths whose neighbours differ in tile, split and place. Rows of one request stay below and above one tile.
INVARIANT_KV = (1500, 0, 64, 3, 700, 129)
INVARIANT_Q = (1, 4, 60, 3, 33, 129)
SPLITS = {"fixed": {"fixed_split_size": 8}, "never": {"disable_split_kv": True}}


def run(inputs: Any, device: str) -> Outputs:
    return Runner(inputs, device, flashpage).run()


def bits(outputs: Outputs) -> tuple[torch.Tensor, torch.Tensor]:
    integers = {2: torch.int16, 4: torch.int32}[outputs.out.element_size()]
    return outputs.out.cpu().view(integers), outputs.lse.cpu().view(torch.int32)


def assert_same_bits(a: Outputs, b: Outputs) -> None:
    for x, y in zip(bits(a), bits(b), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("case", REPEATED, ids=str)
def test_same_bits_every_time(case: Case, device: str, kernels: None) -> None:
    inputs = make_inputs(case)
    first = run(inputs, device)
    compare(case, first, reference_states(inputs))
    for _ in range(5):
        assert_same_bits(first, run(inputs, device))


@pytest.mark.parametrize("case", REPEATED, ids=str)
def test_one_plan_runs_many_times(case: Case, device: str, kernels: None) -> None:
    """A run does not use up its plan, and leaves nothing in the workspaces that changes the next run."""
    runner = Runner(make_inputs(case), device, flashpage)
    wrapper, q, kv = runner.planned(), runner.q(), runner.kv()
    first = Outputs(*wrapper.run(q, *kv, return_lse=True))
    for _ in range(3):
        assert_same_bits(first, Outputs(*wrapper.run(q, *kv, return_lse=True)))


def invariant_cases() -> list[Case]:
    cases = []
    for name, split in SPLITS.items():
        cases.append(decode(f"invariant-{name}-decode", "one row", INVARIANT_KV, **split))
        cases.append(decode(f"invariant-{name}-decode-group-8", "packed", INVARIANT_KV, num_q_heads=16, **split))
        several: dict[str, Any] = {"q_len": 5, "num_q_heads": 8, "sinks": True, "head_dim": 128}
        cases.append(decode(f"invariant-{name}-decode-rows", "several rows, a sink", INVARIANT_KV, **several, **split))
        cases.append(decode(f"invariant-{name}-decode-page-1", "row by row", INVARIANT_KV, page_size=1, **split))
        cases.append(prefill(f"invariant-{name}-paged", "mixed", INVARIANT_Q, INVARIANT_KV, causal=True, **split))
        entry = {"entry": "ragged", "causal": True}
        cases.append(prefill(f"invariant-{name}-ragged", "mixed", INVARIANT_Q, INVARIANT_KV, **entry, **split))
        cases += latent_invariant_cases(name, split)
    return cases


def latent_invariant_cases(name: str, split: dict[str, Any]) -> list[Case]:
    """Latent rows by each kernel that Hopper has for them. Prompts and decode rows of one batch have equal tiles."""
    ones, lists = (1,) * len(INVARIANT_KV), {"selected": "lengths", "num_q_heads": 64}
    mixed: dict[str, Any] = {"num_q_heads": 8, "causal": True}
    return [
        latent_case(f"invariant-{name}", "16 heads", ones, INVARIANT_KV, **split),
        latent_case(f"invariant-{name}-columns", "40 heads", ones, INVARIANT_KV, num_q_heads=40, **split),
        latent_case(f"invariant-{name}-wide", "128 heads", ones, INVARIANT_KV, num_q_heads=128, sinks=True, **split),
        latent_case(f"invariant-{name}-rows", "page 1", ones, INVARIANT_KV, num_q_heads=128, page_size=1, **split),
        latent_case(f"invariant-{name}-mixed", "decode rows and prompts", INVARIANT_Q, INVARIANT_KV, **mixed, **split),
        latent_case(f"invariant-{name}-v32", "fp8", ones, INVARIANT_KV, row_format="deepseek_v32", **split),
        latent_case(f"invariant-{name}-selected", "lists of tokens", ones, INVARIANT_KV, **lists, **split),
    ]


@pytest.mark.parametrize("case", invariant_cases(), ids=str)
def test_same_bits_alone_and_in_any_batch(case: Case, device: str, kernels: None) -> None:
    inputs = make_inputs(case)
    together = run(inputs, device)
    compare(case, together, reference_states(inputs))
    begin = 0
    for request, rows in enumerate(case.q_lens):
        mine = Outputs(together.out[begin : begin + rows], together.lse[begin : begin + rows])
        assert_same_bits(mine, run(one_request(inputs, request), device))
        begin += rows


def test_lse_is_base_two(device: str) -> None:
    """With equal scores over n tokens the lse is log2(n), as an engine's own merge expects."""
    case = decode("lse-base", "", (1, 2, 64, 1000))
    inputs = make_inputs(case)
    for rows in inputs.q:
        rows.zero_()
    lse = run(inputs, device).lse.cpu().double()
    expected = torch.tensor([math.log2(n) for n in case.kv_lens], dtype=torch.float64).reshape(-1, 1)
    assert (lse - expected).abs().max() < 1e-5


@pytest.mark.parametrize("entry", ["decode", "paged"])
def test_states_of_two_halves_merge_to_the_whole(entry: str, device: str) -> None:
    """merge_state takes out and lse of two runs; a half without tokens does not count."""
    lengths = (200, 3, 64)
    whole = Case("halves", "", lengths, (1, 1, 1), entry=entry, q_dtype="float16")
    inputs = make_inputs(whole)
    first = [100, 0, 64]
    halves = []
    for begins, ends in (([0] * 3, first), (first, lengths)):
        parts = [
            [tensor[b:e] for tensor, b, e in zip(tensors, begins, ends, strict=True)]
            for tensors in (inputs.k, inputs.v)
        ]
        counts = tuple(e - b for b, e in zip(begins, ends, strict=True))
        half = assemble(dataclasses.replace(whole, kv_lens=counts), inputs.q, *parts)
        halves.append(run(half, device))
    a, b = halves
    out, lse = flashpage.merge_state(a.out, a.lse, b.out, b.lse)
    exact_out, exact_lse = merge([a.out.cpu(), b.out.cpu()], [a.lse.cpu(), b.lse.cpu()])
    assert ((out.cpu().double() - exact_out).abs() <= 2 * UNIT["float16"] * (1 + exact_out.abs())).all()
    torch.testing.assert_close(lse.cpu().double(), exact_lse, rtol=1e-6, atol=1e-5)
    direct = run(inputs, device)
    assert ((out - direct.out).abs().cpu() <= 4 * UNIT["float16"] * (1 + direct.out.abs().cpu())).all()
    torch.testing.assert_close(lse, direct.lse, rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------- index tensors


def _strided(index: torch.Tensor) -> torch.Tensor:
    wide = torch.full((2 * len(index) + 1,), -7, dtype=index.dtype, device=index.device)
    wide[: 2 * len(index) : 2] = index
    return wide[: 2 * len(index) : 2]


INDEX_FORMS: dict[str, Callable[[torch.Tensor, str], torch.Tensor]] = {
    "int64": lambda index, device: index.to(torch.int64),
    "strided": lambda index, device: _strided(index),
    "int64 strided": lambda index, device: _strided(index.to(torch.int64)),
    "on the device": lambda index, device: index.to(device),
    "int64 on the device": lambda index, device: index.to(device, torch.int64),
    "strided on the device": lambda index, device: _strided(index.to(device)),
}


@pytest.mark.parametrize("form", INDEX_FORMS)
@pytest.mark.parametrize("case", REPEATED, ids=str)
def test_index_tensors_in_any_form_give_the_same_bits(case: Case, form: str, device: str, kernels: None) -> None:
    inputs = make_inputs(case)
    change = INDEX_FORMS[form]
    names = ("indptr", "last_page_len", "indices", "qo_indptr")
    changed = dataclasses.replace(inputs, **{name: change(getattr(inputs, name), device) for name in names})
    assert_same_bits(run(inputs, device), run(changed, device))


# ---------------------------------------------------------------- 64-bit offsets


def big_tensor(elements: int, device: str, folder: Path) -> torch.Tensor:
    """bf16 memory whose untouched part costs nothing: a sparse file on the CPU, plain memory on a card."""
    if device == "cpu":
        return torch.from_file(str(folder / "sparse"), shared=True, size=elements, dtype=torch.bfloat16)
    if torch.cuda.mem_get_info(device)[0] < 3 * elements:
        pytest.skip("not enough memory on the card")
    return torch.empty(elements, dtype=torch.bfloat16, device=device)


FAR = 2**32 + 2**20  # elements: past 32 bits, signed or not, and also in products with bytes


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_pages_past_32_bits(kv_layout: str, device: str, tmp_path: Path) -> None:
    case = decode("far-pages", "", (40, 200), kv_layout=kv_layout, cache="interleaved")
    inputs = make_inputs(case)
    near = inputs.cache.buffers[0]
    pages, page_elements = near.shape[0], near[0].numel()
    first = FAR // page_elements
    far = big_tensor((first + pages) * page_elements, device, tmp_path).view(-1, *near.shape[1:])
    far[first:] = near.to(device)
    runner = Runner(dataclasses.replace(inputs, indices=inputs.indices + first), device, flashpage)
    runner.kv = lambda: ((far[..., : case.head_dim], far[..., case.head_dim :]),)
    outputs = runner.run()
    compare(case, outputs, reference_states(inputs))
    assert_same_bits(outputs, run(inputs, device))


@pytest.mark.parametrize("entry", ["paged", "ragged"])
def test_rows_past_32_bits(entry: str, device: str, tmp_path: Path) -> None:
    """q (and K of a ragged cache) with rows gigabytes apart."""
    case = prefill("far-rows", "", (2, 1), (2, 1), entry=entry, causal=True)
    inputs = make_inputs(case)
    stride, rows = FAR // 2, 3
    memory = big_tensor(2 * stride + 4096, device, tmp_path)

    def spread(near: torch.Tensor, offset: int) -> torch.Tensor:
        far = memory[offset:].as_strided((rows, *near.shape[1:]), (stride, near.shape[2], 1))
        far.copy_(near)
        return far

    runner = Runner(inputs, device, flashpage)
    q, kv = runner.q(), runner.kv()
    runner.q = lambda: spread(q, 0)
    if entry == "ragged":
        runner.kv = lambda: (spread(kv[0][:rows], 1024), kv[1][:rows])
    compare(case, runner.run(), reference_states(inputs))


NAN_SCALES = [
    decode("nan-scale-decode", "split and merged", (3000, 7)),
    prefill("nan-scale-prefill", "larger tiles", (40, 5), (40, 900), causal=True),
]


@pytest.mark.parametrize("case", NAN_SCALES, ids=str)
def test_nan_scale_is_seen(case: Case, device: str) -> None:
    """NaN scales of a bad calibration show in out and lse, and only for their heads."""
    inputs = make_inputs(case)
    good = run(dataclasses.replace(inputs, scales={"k_scale": torch.tensor([1.0, 1.0])}), device)
    bad = run(dataclasses.replace(inputs, scales={"k_scale": torch.tensor([1.0, math.nan])}), device)
    half = case.num_q_heads // 2
    assert bad.out[:, half:].isnan().all() and bad.lse[:, half:].isnan().all()
    assert torch.equal(bad.out[:, :half], good.out[:, :half]) and torch.equal(bad.lse[:, :half], good.lse[:, :half])


# ---------------------------------------------------------------- values at run, threads, devices

AT_RUN = {
    "full": {"causal": False, "window_left": -1, "logits_soft_cap": 0.0, "sm_scale": 0.125},
    "causal": {"causal": True, "window_left": -1, "logits_soft_cap": 0.0, "sm_scale": 0.125},
    "window": {"causal": True, "window_left": 9, "logits_soft_cap": 0.0, "sm_scale": 0.125},
    "cap": {"causal": True, "window_left": -1, "logits_soft_cap": 3.0, "sm_scale": 0.3},
}


def test_values_at_run_win_and_the_plan_stays(device: str) -> None:
    """forward with other options, in any order, equals a plan with these options."""
    base = prefill("at-run", "", MIXED_Q, MIXED_KV, outputs="returned")
    inputs = make_inputs(base)
    expected = {}
    for name, values in AT_RUN.items():
        case = dataclasses.replace(
            base,
            causal=values["causal"],
            window_left=values["window_left"],
            soft_cap=values["logits_soft_cap"],
            sm_scale=values["sm_scale"],
        )
        expected[name] = run(dataclasses.replace(inputs, case=case), device)
    runner = Runner(inputs, device, flashpage)
    for _ in range(2):
        wrapper, q, kv = runner.planned(), runner.q(), runner.kv()
        for name in ("window", "full", "cap", "window", "causal", "full"):
            assert_same_bits(expected[name], Outputs(*wrapper.forward_return_lse(q, *kv, **AT_RUN[name])))


def test_runs_from_a_second_thread(device: str) -> None:
    inputs = make_inputs(REPEATED[0])
    expected, found = run(inputs, device), []
    worker = threading.Thread(target=lambda: found.append(run(inputs, device)))
    worker.start()
    worker.join()
    assert_same_bits(expected, found[0])


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one card")
def test_second_card() -> None:
    """The first card stays this thread's current device."""
    for case in REDUCED:
        if case.runs_on("cuda:1"):
            run_case(case, "cuda:1")
    assert torch.cuda.current_device() == 0
