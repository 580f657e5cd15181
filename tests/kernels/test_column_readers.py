"""Which batches have V in e4m3 transposed before, and which kernels read that copy: one, whatever the rows.

test_value_columns.py has the copy and its plans.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import cases.columns
import pytest
import torch
from cases.case import Case

import flashpage
from flashpage.base.dtypes import DType
from flashpage.base.errors import CapabilityError
from flashpage.kernels import ATTENTION, devices
from flashpage.kernels.choose import choose_for_card
from flashpage.kernels.context_classes import CLASSES, ContextClass
from flashpage.kernels.options import Options
from flashpage.kernels.work import Problem, Work
from flashpage.plan import gather_rows, value_columns
from flashpage.variants import builtin

H200, E4M3 = devices.H200, DType.FLOAT8_E4M3
PAGED = Options("paged", 32, 8, 128, 128, 16, E4M3, E4M3, DType.BFLOAT16, causal=True)
RAGGED = dataclasses.replace(PAGED, kv_source="ragged", page_size=0)
AS_COLUMNS = value_columns.as_columns(PAGED)


# ---------------------------------------------------------------- batches


@pytest.mark.parametrize(
    ("options", "batch", "q_len", "kv_len", "is_worth_it"),
    [
        (PAGED, 4, 4096, 4096, True),
        (RAGGED, 4, 4096, 4096, True),
        (RAGGED, 1, 16384, 16384, True),
        (dataclasses.replace(RAGGED, num_q_heads=64), 1, 8192, 8192, True),
        (PAGED, 16, 1024, 1024, False),  # rows see 512 tokens
        (PAGED, 4, 2048, 2048, False),
        (PAGED, 1, 2048, 131072, True),
        (PAGED, 4, 512, 16384, False),  # 2,048 packed rows
        (dataclasses.replace(PAGED, num_q_heads=64), 4, 530, 16384, True),
        (dataclasses.replace(PAGED, window_left=1024), 4, 8192, 8192, False),
        (PAGED, 0, 0, 0, False),
    ],
    ids=str,
)
def test_a_batch_is_worth_it(options: Options, batch: int, q_len: int, kv_len: int, is_worth_it: bool) -> None:
    worth = gather_rows.GatherPolicy(options, H200)
    assert worth.may_be
    assert worth.is_for(batch, batch * q_len, batch * kv_len) is is_worth_it


def test_users_variants_have_no_copy() -> None:
    of_user = flashpage.Variant(score_mod=lambda score, b, h, q_idx, kv_idx: score)
    for changed, may_be in (({}, True), ({"variant": of_user}, False), ({"uniform_q_len": 200}, False)):
        options = dataclasses.replace(PAGED, **changed)
        assert gather_rows.GatherPolicy(options, H200).may_be is may_be


@pytest.mark.parametrize("case", cases.columns.rows(), ids=str)
def test_the_tables_batches_are_worth_it(case: Case) -> None:
    is_ragged = case.entry == "ragged"
    types = (DType(case.q_dtype), DType(case.kv_type), DType(case.out_type))
    dims = (case.num_q_heads, case.num_kv_heads, case.head_dim, case.value_dim)
    options = Options("ragged" if is_ragged else "paged", *dims, 0 if is_ragged else case.page_size, *types)
    options = dataclasses.replace(
        options, causal=case.causal, window_left=case.window_left, has_soft_cap=case.soft_cap > 0
    )
    worth = gather_rows.GatherPolicy(options, H200)
    assert worth.may_be and worth.is_for(len(case.q_lens), sum(case.q_lens), sum(case.kv_lens))
    spec = choose_for_card(Problem(gather_rows.as_rows(options), 4096), H200, builtin(soft_cap=case.soft_cap).spec).spec
    assert (spec.kernel, spec.loader) == ("prefill_sm90", "columns")


# ---------------------------------------------------------------- the kernels that read the copy

CHANGES: list[dict[str, Any]] = [
    *({"page_size": size} for size in (1, 8, 16, 48)),
    *({"head_dim_qk": dim, "head_dim_vo": dim} for dim in (16, 32, 64, 80, 96, 112, 192, 256)),
    *({"q_dtype": q, "kv_dtype": kv} for q, kv in ((DType.BFLOAT16, E4M3), (DType.FLOAT16,) * 2, (E4M3,) * 2)),
    *({"q_dtype": DType.FLOAT8_E5M2, "kv_dtype": kv} for kv in (E4M3, DType.FLOAT8_E5M2)),
    *({"out_dtype": dtype} for dtype in (DType.FLOAT16, DType.FLOAT32, E4M3)),
    {"kv_source": "ragged", "page_size": 0},
    {"kv_source": "latent", "num_kv_heads": 1, "head_dim_qk": 576, "head_dim_vo": 512},
    {"kv_dtype": DType.BYTES, "k_format": "nvfp4", "v_format": "nvfp4"},
    {"has_mask": True, "causal": False},
    {"position_encoding": "ROPE_LLAMA"},
    {"uniform_q_len": 1},
    {"num_q_heads": 8},
    {"chunk": 64},
]


@pytest.mark.parametrize("changed", CHANGES, ids=str)
def test_other_kernels_refuse_the_copy(changed: dict[str, Any]) -> None:
    """Whatever the rows and the card: a kernel that accepts V by columns has the loader of columns, and its tile."""
    options = dataclasses.replace(AS_COLUMNS, **changed)
    cards = {card.sm: card for card in (*devices.CARDS, devices.CPU)}.values()
    caps = builtin(5.0).spec, builtin().spec, builtin(None, torch.ones(options.num_q_heads)).spec
    for kernel, card, rows, variant in itertools.product(ATTENTION, cards, (1, 8, 64, 65, 4096), caps):
        for contexts, source in itertools.product(CLASSES, ("implicit", "function", "packed_bits")):
            work = Work(Problem(options, rows, contexts=contexts), card, variant, source)
            if kernel.refusals(work):
                continue
            assert (kernel.name, kernel.spec(work).loader) == ("prefill_sm90", "columns")
            assert kernel.tile(work).tile_kv == 128 and options.page_size % 16 == 0


@pytest.mark.parametrize("rows", [1, 4, 16, 64, 65, 4096])
@pytest.mark.parametrize("contexts", CLASSES)
def test_batches_of_few_rows_have_the_same_kernel(rows: int, contexts: ContextClass) -> None:
    """Decode kernels would come first."""
    assert choose_for_card(Problem(PAGED, 1), H200).kernel.name != "prefill_sm90"
    spec = choose_for_card(Problem(AS_COLUMNS, rows, contexts=contexts), H200).spec
    assert (spec.kernel, spec.loader) == ("prefill_sm90", "columns")
    assert spec.tile is not None and spec.tile.tile_kv == 128


def test_no_other_card_has_such_a_kernel() -> None:
    for card in (*devices.CARDS, devices.CPU):
        if card.sm != 90:
            with pytest.raises(CapabilityError, match="no copy of V by columns"):
                choose_for_card(Problem(AS_COLUMNS, 4096), card)
