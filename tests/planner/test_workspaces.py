"""workspace_size covers each batch within its sizes, whatever tile the batch gets."""

from __future__ import annotations

import ctypes
import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from planner_batches import Batch, Cutting, arrays_of, call, problem_of, visibility_of
from random_batches import random_case

from flashpage import jit, native
from flashpage.base.dtypes import DType
from flashpage.kernels import choose, devices, schedules
from flashpage.kernels.context_classes import ContextClass
from flashpage.kernels.options import Options
from flashpage.kernels.prefill_sm90 import FEW_NOTE
from flashpage.kernels.spec import KernelSpec
from flashpage.kernels.work import Problem
from flashpage.plan import plan_lengths
from flashpage.plan.bounds import Sizes, workspace_bounds
from flashpage.plan.workspaces import partial_bytes

BF16 = DType.BFLOAT16
DECODE = Options("paged", 32, 8, 128, 128, 16, BF16, BF16, BF16, uniform_q_len=1)


@pytest.mark.parametrize("heads", [(1, 1), (32, 8), (8, 2), (128, 1)], ids=str)
def test_workspaces_have_room_for_pairs(heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """workspace_bounds assumes single CTAs: an equal number of rows in pairs needs no more."""
    monkeypatch.setattr(devices, "of", lambda _: devices.H200)
    options = dataclasses.replace(DECODE, uniform_q_len=0, causal=True, num_q_heads=heads[0], num_kv_heads=heads[1])

    def bounds(batch: int, rows: int, is_long: bool) -> tuple[int, int]:
        contexts = ContextClass.LONG if is_long else ContextClass.USUAL
        choice = choose.choose(Problem(options, 4096, contexts=contexts), torch.device("cuda:0"))
        assert choice.spec.ctas == 1 + is_long
        schedule = schedules.schedule(choice, options, 132 // choice.spec.ctas)
        needed = ctypes.c_int64(), ctypes.c_int64()
        given = batch, rows, 1 << 20, 0, *heads, ctypes.byref(options.visibility), ctypes.byref(schedule)
        native.check(native.load().fp_plan_bounds(*given, *map(ctypes.byref, needed)))
        return needed[0].value, needed[1].value

    for batch, rows in ((1, 1), (1, 16384), (3, 100), (64, 1000), (300, 100_000)):
        of_pairs, of_singles = bounds(batch, rows, True), bounds(batch, rows, False)
        assert all(pair <= single for pair, single in zip(of_pairs, of_singles, strict=True))


@pytest.mark.parametrize("heads", [(8, 2), (32, 8), (4, 4), (40, 1)], ids=str)
def test_workspaces_have_room_for_few_rows(heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch with few rows uses twice the CTAs and units of half the rows: its plans fit the bounds."""
    monkeypatch.setattr(devices, "of", lambda _: devices.H200)
    info = native.KernelInfo(num_sms=132, ctas_per_sm=1)
    monkeypatch.setattr(jit, "get_kernel", lambda spec, device=None: SimpleNamespace(spec=spec, info=info, handle=0))
    options = dataclasses.replace(DECODE, uniform_q_len=0, causal=True, num_q_heads=heads[0], num_kv_heads=heads[1])
    rng, were_few, were_cut = np.random.default_rng(0), 0, 0
    for _ in range(100):
        batch = int(rng.integers(1, 20))
        rows = rng.integers(1, 2 + 2 * 132 * 64 // heads[0] // batch, batch)
        tokens = rows + rng.integers(0, 1500, batch)
        plan = plan_lengths(rows.tolist(), tokens.tolist(), *heads)
        if FEW_NOTE not in plan.explain():
            continue
        pages = int((-(-tokens // 16)).sum())
        sizes = Sizes(batch, int(rows.sum()), pages * 16, int(-(-tokens // 16).max()) * 16)
        float_bytes, int_bytes = workspace_bounds(options, sizes, torch.device("cuda:0"))
        assert plan.result.used_bytes <= int_bytes
        assert partial_bytes(plan.result.num_partial_rows, 128) <= float_bytes
        were_few, were_cut = were_few + 1, were_cut + (plan.result.num_partial_rows > 0)
    assert were_few > 20 and were_cut > 3


@pytest.mark.parametrize("dims", [(192, 128), (256, 256), (128, 128)], ids=str)
@pytest.mark.parametrize("name", ["RTX 4090", "A100", "H100"])
def test_workspaces_have_room_for_smaller_batches(
    name: str, dims: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer rows a request have tiles of their own, of which an SM may run more CTAs."""
    card = devices.as_card(name, devices.H200)
    monkeypatch.setattr(devices, "of", lambda _: card)

    def kernel(spec: KernelSpec, device: Any = None) -> SimpleNamespace:
        per_sm = spec.tile.ctas_per_sm if spec.tile else 1
        return SimpleNamespace(spec=spec, handle=0, info=native.KernelInfo(num_sms=card.sms, ctas_per_sm=per_sm))

    monkeypatch.setattr(jit, "get_kernel", kernel)
    options = dataclasses.replace(DECODE, uniform_q_len=0, causal=True, head_dim_qk=dims[0], head_dim_vo=dims[1])
    large = workspace_bounds(options, Sizes(4, 8192, 65_536), torch.device("cuda:0"))
    for rows in (1, 3, 4, 8, 16, 17, 64):
        small = workspace_bounds(options, Sizes(4, 4 * rows, 65_536), torch.device("cuda:0"))
        assert small[0] <= large[0] and small[1] <= large[1], rows


def _fixed_bounds(batch: Batch, cutting: Cutting, limits: tuple[int, int, int], longest: int) -> tuple[int, int]:
    needed = ctypes.c_int64(), ctypes.c_int64()
    given = *limits, longest, batch.num_q_heads, batch.num_kv_heads
    views = ctypes.byref(visibility_of(batch)), ctypes.byref(cutting.struct())
    native.check(native.load().fp_plan_bounds(*given, *views, *map(ctypes.byref, needed)))
    return needed[0].value, needed[1].value


@pytest.mark.parametrize("one_row", [True, False], ids=["one row", "any rows"])
@pytest.mark.parametrize("seed", range(12))
def test_a_longest_request_bounds_fixed_splits(seed: int, one_row: bool) -> None:
    """Batches within the limits, some of them at a limit: no plan needs more than was promised for all of them."""
    rng = np.random.default_rng(seed)
    batch, cutting = random_case(rng)
    cutting = dataclasses.replace(cutting, fixed_piece_tokens=int(rng.choice([16, 100, 512, 512, -1])))
    if rng.random() < 0.3:
        batch = dataclasses.replace(batch, chunk=int(rng.choice([64, 700])), has_mask_tiles=False)
    most, longest = int(rng.integers(1, 20)), int(rng.integers(1, 4000))
    rows = most if one_row else int(rng.integers(most, 900))
    limits = most, 0 if one_row else rows, most * longest
    promised = _fixed_bounds(batch, cutting, limits, longest)
    of_any = _fixed_bounds(batch, cutting, limits, 0)
    assert all(mine <= other for mine, other in zip(promised, of_any, strict=True))
    for _ in range(25):
        count = int(rng.integers(1, most + 1))
        kinds = rng.integers(0, longest + 1, count), np.full(count, longest), rng.integers(0, 2, count) * longest
        kv_lens = kinds[int(rng.integers(0, 3))].astype(np.int64)
        parts = np.sort(rng.integers(0, rows + 1, count - 1))
        q_lens = np.ones(count, np.int64) if one_row else np.diff(parts, prepend=0, append=rows).astype(np.int64)
        case = dataclasses.replace(batch, q_lens=q_lens, kv_lens=kv_lens, page_size=0)
        arrays = arrays_of(case)
        status, _, result = call(problem_of(case, arrays), cutting, promised[0])
        assert status == native.OK, (case, cutting, native.last_error())
        assert result.num_partial_rows <= promised[1], (case, cutting)
