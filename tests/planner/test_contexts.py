"""Classes of context lengths, and the tiles that follow from them (flashpage/kernels/context_lengths.py)."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from plan_calls import PlanCall
from planner_batches import Batch, arrays_of, problem_of

from flashpage import BatchPrefillWithPagedKVCacheWrapper, native
from flashpage.base.dtypes import DType
from flashpage.base.errors import KernelMissingError
from flashpage.kernels import ATTENTION, attention_sm80, choose, context_lengths, devices, schedules
from flashpage.kernels.context_classes import ANY_ROWS, ContextClass, context_row
from flashpage.kernels.context_lengths import ContextLengths
from flashpage.kernels.options import Options
from flashpage.kernels.prefill_sm90 import FEW_NOTE, PAIRS_NOTE, SHORT_NOTE
from flashpage.kernels.spec import VariantSpec
from flashpage.kernels.work import Problem
from flashpage.plan import prepared_kernels
from flashpage.variants import Variant, builtin

BF16 = DType.BFLOAT16
DECODE = Options("paged", 32, 8, 128, 128, 16, BF16, BF16, BF16, uniform_q_len=1)
LATENT = Options("latent", 128, 1, 576, 512, 64, BF16, BF16, BF16, causal=True)


def class_of(lengths: ContextLengths, requests: int, rows: int, tokens: int) -> ContextClass:
    """The class of equal requests with so many rows and tokens in total."""
    return lengths.of([rows // requests] * requests, [tokens // requests] * requests)


def usual_and(
    contexts: ContextClass, changed: dict[str, Any], variant: VariantSpec
) -> tuple[choose.KernelChoice, choose.KernelChoice]:
    """The usual choice for a prefill, and the choice for these contexts."""
    options = dataclasses.replace(DECODE, **changed)
    problems = (Problem(options, 4096, contexts=each) for each in (ContextClass.USUAL, contexts))
    usual, other = (choose.choose(problem, torch.device("cuda:0"), variant) for problem in problems)
    return usual, other


@pytest.mark.parametrize(
    ("changed", "rows", "tokens", "is_long"),
    [
        ({}, 1600, 1600, True),  # a row sees 800 tokens on average, for four heads
        ({}, 1500, 1500, False),
        ({}, 256, 4096, True),
        ({}, 200, 4096, False),  # 800 packed rows: three pairs of tiles and half of one
        ({}, 64, 4096, True),  # 256: one pair
        ({}, 96, 4096, False),  # 384: one and a half
        ({"position_encoding": "ALIBI"}, 64, 4096, True),
        ({"has_soft_cap": True, "q_dtype": DType.FLOAT16, "kv_dtype": DType.FLOAT16}, 64, 4096, True),
        ({"has_soft_cap": True}, 4096, 4096, False),  # no pairs over pages
        ({"has_soft_cap": True, "kv_source": "ragged", "page_size": 0}, 4096, 4096, True),
        ({"causal": False}, 800, 800, True),
        ({"num_kv_heads": 8}, 4096, 4096, False),
        ({"num_kv_heads": 8}, 7000, 7000, True),
        ({"window_left": 600}, 4096, 4096, False),
        ({"window_left": 800}, 4096, 4096, True),
        ({"q_dtype": DType.FLOAT8_E4M3, "kv_dtype": DType.FLOAT8_E4M3}, 1024, 1024, True),
        ({"fixed_piece_tokens": 256}, 4096, 4096, False),
        ({"uniform_q_len": 4096}, 4096, 4096, False),
    ],
)
def test_contexts_are_long_where_pairs_pay(changed: dict[str, Any], rows: int, tokens: int, is_long: bool) -> None:
    options = dataclasses.replace(DECODE, uniform_q_len=0, causal=True, num_q_heads=8, num_kv_heads=2)
    options = dataclasses.replace(options, **changed)
    lengths = ContextLengths(options, devices.H200)
    assert (class_of(lengths, 3, 3 * rows, 3 * tokens) is ContextClass.LONG) is is_long
    assert lengths.of([], []) is ContextClass.USUAL


@pytest.mark.parametrize(
    ("changed", "variant", "tokens", "is_short"),
    [
        ({}, VariantSpec(), 128, True),
        ({"kv_source": "ragged", "page_size": 0}, VariantSpec(), 128, True),
        ({"q_dtype": DType.FLOAT16, "kv_dtype": DType.FLOAT16}, VariantSpec(), 128, True),
        ({"page_size": 1}, VariantSpec(), 160, False),
        ({"has_mask": True}, VariantSpec(), 160, False),
        ({}, builtin(soft_cap=30.0).spec, 80, False),
        ({"head_dim_qk": 192}, VariantSpec(), 96, True),
        ({"head_dim_qk": 256, "head_dim_vo": 256}, VariantSpec(), 48, True),
        ({"head_dim_qk": 192, "head_dim_vo": 192}, VariantSpec(), 80, False),
    ],
)
def test_short_contexts_have_short_tiles(
    changed: dict[str, Any], variant: VariantSpec, tokens: int, is_short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "of", lambda _: devices.H200)
    usual, choice = usual_and(ContextClass.SHORT, changed, variant)
    assert choice.spec.tile is not None and choice.spec.tile.tile_kv == tokens
    assert (choice.spec != usual.spec) is (SHORT_NOTE in choice.reasons) is is_short


@pytest.mark.parametrize(
    ("changed", "variant", "tokens"),
    [
        ({}, VariantSpec(), 64),
        ({"kv_source": "ragged", "page_size": 0}, VariantSpec(), 64),
        ({"head_dim_qk": 64, "head_dim_vo": 64}, VariantSpec(), 64),
        ({"head_dim_qk": 192}, VariantSpec(), 64),
        ({"head_dim_qk": 192, "head_dim_vo": 192}, VariantSpec(), 48),
        ({"head_dim_qk": 256, "head_dim_vo": 256}, VariantSpec(), 0),
        ({"page_size": 1}, VariantSpec(), 0),
        ({"has_mask": True}, VariantSpec(), 0),
        ({"position_encoding": "ROPE_LLAMA"}, VariantSpec(), 0),
        ({}, builtin(soft_cap=30.0).spec, 0),
    ],
)
def test_few_rows_have_tiles_of_one_warpgroup(
    changed: dict[str, Any], variant: VariantSpec, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contexts of this many tokens; 0: they use the usual tiles."""
    monkeypatch.setattr(devices, "of", lambda _: devices.H200)
    usual, choice = usual_and(ContextClass.FEW, changed, variant)
    assert choice.spec.tile is not None
    assert (choice.spec != usual.spec) is (FEW_NOTE in choice.reasons) is (tokens > 0)
    assert tokens == 0 or (choice.spec.tile.tile_q, choice.spec.tile.tile_kv) == (64, tokens)


@pytest.mark.parametrize(
    ("changed", "has_them"),
    [
        ({}, True),
        ({"num_q_heads": 128, "num_kv_heads": 1}, False),
        ({"head_dim_vo": 256}, False),
        ({"has_mask": True}, False),
        ({"has_soft_cap": True}, False),
        ({"uniform_q_len": 64}, False),
        ({"fixed_piece_tokens": 256}, False),
        ({"kv_dtype": DType.FLOAT8_E4M3}, False),
    ],
)
def test_rows_are_few_up_to_one_unit_for_half_an_sm(changed: dict[str, Any], has_them: bool) -> None:
    options = dataclasses.replace(DECODE, uniform_q_len=0, num_q_heads=8, num_kv_heads=2)
    lengths = ContextLengths(dataclasses.replace(options, **changed), devices.H200)
    assert (ContextClass.FEW in lengths.classes) == has_them
    sizes = ((1, 2112, 1200), (10, 20480, 1600), (1, 2113, 1200), (1, 2112, 1201), (10, 20480, 1610), (2, 32, 200))
    few = [has_them, has_them, False, False, False, False]
    assert [class_of(lengths, *size) is ContextClass.FEW for size in sizes] == few


@pytest.mark.parametrize(
    ("changed", "rows", "tile_q"),
    [
        ({"head_dim_qk": 64, "head_dim_vo": 64}, 32, 128),  # one tile, which would be 192
        ({"head_dim_qk": 64, "head_dim_vo": 64}, 48, 192),
        ({"head_dim_qk": 64, "head_dim_vo": 64}, 60, 128),
        ({"head_dim_qk": 64, "head_dim_vo": 64}, 1000, 192),
        ({"head_dim_qk": 96, "head_dim_vo": 96}, 20, 128),
        ({"has_soft_cap": True}, 64, 128),
        ({"has_soft_cap": True}, 48, 192),
        ({"has_soft_cap": True, "page_size": 1}, 48, 128),
        ({"num_kv_heads": 4, "head_dim_qk": 64, "head_dim_vo": 64}, 24, 192),  # groups of eight
        ({}, 32, 128),
        ({}, 48, 192),  # two tiles of 128, or one of 192
        ({}, 90, 128),  # 192 and 256 rows of units are as many, but see too few tokens
        ({}, 1000, 128),
        ({"page_size": 1}, 48, 128),
        ({"has_mask": True}, 48, 128),
        ({"head_dim_qk": 192}, 48, 128),
    ],
)
def test_rows_that_fill_other_tiles_better_have_them(changed: dict[str, Any], rows: int, tile_q: int) -> None:
    options = dataclasses.replace(DECODE, uniform_q_len=0, causal=True, **changed)
    contexts = ContextLengths(options, devices.H200).of([rows] * 200, [5000] * 200)
    variant = builtin(soft_cap=30.0).spec if options.has_soft_cap else VariantSpec()
    problem = Problem(options, choose.packed_rows(options, 1, rows), contexts=contexts)
    spec = choose.choose_for_card(problem, devices.H200, variant).spec
    assert (spec.kernel, spec.rows // spec.ctas) == ("prefill_sm90", tile_q)


def test_long_contexts_have_taller_tiles_where_these_are_one_less() -> None:
    lengths = ContextLengths(dataclasses.replace(DECODE, uniform_q_len=0, causal=True), devices.H200)
    assert lengths.of([90] * 4, [32768] * 4) is ContextClass.OTHER_HEIGHT
    assert lengths.of([120] * 4, [32768] * 4) is not ContextClass.OTHER_HEIGHT  # four tiles are two pairs


@pytest.mark.parametrize(
    ("changed", "window", "rows", "tokens", "is_taller"),
    [
        ({}, 512, 4096, 4096, True),
        ({}, 256, 1024, 1024, True),
        ({}, 512, 48, 4096, True),
        ({}, 512, 30, 4096, False),  # one tile either way
        ({}, 512, 64, 4096, False),  # two tiles either way
        ({}, 1024, 4096, 4096, False),  # pairs
        ({}, 512, 900, 900, False),  # most rows see less than the window
        ({"num_q_heads": 16}, 512, 4096, 4096, False),  # groups of two: a unit's rows span 96 tokens
        ({"head_dim_qk": 64, "head_dim_vo": 64}, 512, 4096, 4096, False),  # usual tiles are as tall
        ({"page_size": 1}, 512, 4096, 4096, False),
    ],
)
def test_windows_of_taller_tiles(changed: dict[str, Any], window: int, rows: int, tokens: int, is_taller: bool) -> None:
    base = dataclasses.replace(DECODE, uniform_q_len=0, causal=True, num_q_heads=32, num_kv_heads=8)
    options = dataclasses.replace(base, window_left=window - 1, **changed)
    found = ContextLengths(options, devices.H200).of([rows] * 64, [tokens] * 64)
    assert (found is ContextClass.OTHER_HEIGHT) == is_taller


@pytest.mark.parametrize(
    ("dims", "heads", "window", "tokens", "is_short"),
    [
        ((192, 128), 16, 0, 2048, True),  # a row sees 1,024 tokens
        ((192, 128), 16, 0, 2200, False),
        ((192, 128), 256, 0, 2048, True),  # pairs would read K and V for groups of 16, but gain less
        ((192, 128), 16, 1024, 9000, True),
        ((192, 128), 16, 1025, 9000, False),  # a unit's rows span 128 tokens, and see 1,153
        ((256, 256), 16, 0, 512, False),
        ((256, 256), 32, 512, 9000, True),
        ((256, 256), 16, 512, 9000, False),
    ],
)
def test_wide_heads_have_short_tiles(
    dims: tuple[int, int], heads: int, window: int, tokens: int, is_short: bool
) -> None:
    """`heads` of 16 KV heads; a window of 0 is none."""
    sizes: dict[str, Any] = {"head_dim_qk": dims[0], "head_dim_vo": dims[1], "num_q_heads": heads, "num_kv_heads": 16}
    options = dataclasses.replace(DECODE, uniform_q_len=0, causal=True, window_left=window - 1, **sizes)
    found = ContextLengths(options, devices.H200).of([tokens] * 64, [tokens] * 64)
    assert (found is ContextClass.SHORT) is is_short


@pytest.mark.parametrize(
    ("changed", "dim_vo", "expected"),
    [
        ({"has_soft_cap": True}, 128, ContextClass.LONG),
        ({"position_encoding": "ALIBI"}, 128, ContextClass.LONG),
        ({"variant": Variant(logit="score * 2")}, 128, ContextClass.LONG),
        ({"variant": Variant(score_mod=lambda score, b, h, q_idx, kv_idx: score * 2)}, 128, ContextClass.LONG),
        ({"variant": Variant(mask="kv_idx != 3")}, 128, ContextClass.SHORT),
        ({"causal": False, "window_left": 100}, 128, ContextClass.USUAL),
        ({"causal": False, "window_left": 100}, 256, ContextClass.USUAL),
    ],
)
def test_batches_that_short_tiles_do_not_serve(changed: dict[str, Any], dim_vo: int, expected: ContextClass) -> None:
    """They keep pairs: no short tile computes on scores. Without causal a row sees all tokens after its window."""
    sizes: dict[str, Any] = {"head_dim_qk": max(192, dim_vo), "head_dim_vo": dim_vo, "num_q_heads": 32}
    options = dataclasses.replace(DECODE, uniform_q_len=0, causal=True, num_kv_heads=2, **sizes)
    options = dataclasses.replace(options, kv_source="ragged", page_size=0, **changed)
    tokens = 4096 if options.window_left >= 0 else 1600
    assert ContextLengths(options, devices.H200).of([tokens] * 8, [tokens] * 8) is expected


def test_prompts_count_by_their_rows_as_well_as_by_their_number() -> None:
    """One prompt has nearly all rows, which see many tokens; most requests are short."""
    lengths = ContextLengths(dataclasses.replace(DECODE, uniform_q_len=0, causal=True), devices.H200)
    assert lengths.of([4096] + [20] * 8, [4096] + [20] * 8) is ContextClass.USUAL
    assert lengths.of([236 * 2] * 9, [236 * 2] * 9) is ContextClass.SHORT  # what they see on average
    assert lengths.of([4096] + [20] * 500, [4096] + [20] * 500) is ContextClass.FEW


@pytest.mark.parametrize(("tokens", "rows"), [(9000, 128), (8000, 120)])
def test_units_of_long_contexts_have_rows_of_part_of_a_group(tokens: int, rows: int) -> None:
    """Wide heads in groups of 12: whole rows of the group leave eight rows of a tile unused."""
    options = dataclasses.replace(DECODE, uniform_q_len=0, num_q_heads=96, head_dim_qk=256, head_dim_vo=256)
    contexts = ContextLengths(options, devices.H200).of([512] * 4, [tokens] * 4)
    choice = choose.choose_for_card(Problem(options, 1 << 13, contexts=contexts), devices.H200)
    assert choice.spec.kernel == "prefill_sm90"
    assert schedules.schedule(choice, options, 132).tile_q == rows


def test_classes_are_those_of_the_cards_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cards without prefill_sm90 have one class; a new kernel brings its own classes."""
    options, batch = dataclasses.replace(DECODE, uniform_q_len=0, causal=True), (3, 3 * 4096, 3 * 4096)
    assert class_of(ContextLengths(options, devices.named("H20")), *batch) is ContextClass.LONG
    for card in (devices.CPU, devices.named("A100"), devices.named("B200")):
        assert class_of(ContextLengths(options, card), *batch) is ContextClass.USUAL
    row = context_row(ContextClass.SHORT, ANY_ROWS, 0, most_tokens=4096)
    added = dataclasses.replace(attention_sm80.KERNEL, name="added", archs=(80,), context_rows=lambda *_: [row])
    monkeypatch.setattr(context_lengths, "ATTENTION", [added, *ATTENTION])
    assert class_of(ContextLengths(options, devices.named("A100")), *batch) is ContextClass.SHORT
    assert class_of(ContextLengths(options, devices.named("H20")), *batch) is ContextClass.LONG


@pytest.mark.parametrize(
    ("changed", "variant", "has_pairs"),
    [
        ({}, VariantSpec(), True),
        ({"kv_source": "ragged", "page_size": 0, "head_dim_qk": 192}, VariantSpec(), True),
        ({"head_dim_qk": 256}, VariantSpec(), False),
        ({"head_dim_qk": 64, "head_dim_vo": 64}, VariantSpec(), False),
        ({"page_size": 1}, VariantSpec(), False),
        ({"has_mask": True}, VariantSpec(), False),
        ({}, builtin(soft_cap=30.0).spec, False),
        ({"kv_source": "ragged", "page_size": 0}, builtin(soft_cap=30.0).spec, True),
        ({}, VariantSpec(mask="kv_idx % 2 == 0"), False),
        ({"kv_dtype": DType.FLOAT8_E4M3}, VariantSpec(), False),
        ({"q_dtype": DType.FLOAT8_E4M3, "kv_dtype": DType.FLOAT8_E4M3, "head_dim_vo": 64}, VariantSpec(), True),
    ],
)
def test_long_contexts_are_read_by_pairs(
    changed: dict[str, Any], variant: VariantSpec, has_pairs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "of", lambda _: devices.H200)
    single, choice = usual_and(ContextClass.LONG, changed, variant)
    assert single.spec.ctas == 1 and single.spec.kernel == choice.spec.kernel == "prefill_sm90"
    assert (choice.spec.ctas, PAIRS_NOTE in choice.reasons) == ((2, True) if has_pairs else (1, False))
    assert not has_pairs or choice.spec.tile == single.spec.tile.paired()
    assert choice.cost == single.cost


@pytest.mark.parametrize(
    ("heads", "rows", "are_equal", "ctas"),
    [
        (128, 1, True, 2),
        (128, 2, True, 4),
        (128, 2, False, 2),
        (128, 3, True, 2),  # three row tiles
        (128, 8, True, 4),
        (128, 10, True, 2),
        (96, 2, True, 4),
        (96, 4, True, 2),
        (40, 5, True, 4),
    ],
)
def test_row_tiles_of_equal_requests_are_computed_side_by_side(
    heads: int, rows: int, are_equal: bool, ctas: int
) -> None:
    """Latent rows: 128 rows are a row tile of a pair of CTAs. What the lengths say and what options say is the same."""
    options, card = dataclasses.replace(LATENT, num_q_heads=heads), devices.named("H100")
    contexts = ContextLengths(options, card).of([rows] * 3 if are_equal else [1, rows, 2 * rows - 1], [4096] * 3)
    problems = [Problem(options, choose.packed_rows(options, 3, 3 * rows), contexts=contexts)]
    if are_equal:
        known = dataclasses.replace(options, uniform_q_len=rows)
        problems.append(Problem(known, choose.packed_rows(known, 3, 3 * rows)))
    for problem in problems:
        spec = choose.choose_for_card(problem, card).spec
        assert (spec.kernel, spec.ctas, spec.rows) == ("latent_wide_sm90", ctas, 64 * ctas)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_given_lengths_count_and_not_the_room_of_their_pages(dtype: torch.dtype) -> None:
    """A table's rows have room for the longest request; the class of a batch follows the tokens that there are."""
    wrapper = BatchPrefillWithPagedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8))
    q_indptr, kv_indptr = torch.tensor([0, 5, 7], dtype=dtype), torch.tensor([0, 100, 200], dtype=dtype)
    lens, pages = torch.tensor([40, 17], dtype=dtype), torch.zeros(200, dtype=torch.int32)
    short = context_row(ContextClass.SHORT, ANY_ROWS, 0, most_tokens=40)
    table = native.ContextTable((native.ContextRow * 16)(short), 1, 2)
    for given, expected in ((lens, ContextClass.SHORT), (None, ContextClass.USUAL)):
        last = torch.full((2,), 16, dtype=dtype)
        wrapper.plan(q_indptr, kv_indptr, pages, last, 2, 1, 64, 16, q_data_type=torch.float32, seq_lens=given)
        options = wrapper._attention.session.active[0]
        options.call.context_table = ctypes.addressof(table)
        assert options._contexts.of_batch(ctypes.addressof(options.call)) is expected
        options.call.context_table = options._contexts.address


@pytest.mark.parametrize("kv_source", ["paged", "latent"])
def test_a_planned_batch_has_the_class_of_its_lengths(kv_source: str) -> None:
    """A plan does not look at contexts where no row of the table may fit, and counts neighbours of equal rows once."""
    changed = {"kv_source": kv_source, "uniform_q_len": 0, "causal": True}
    options = dataclasses.replace(DECODE if kv_source == "paged" else LATENT, **changed)
    contexts, rng, found = ContextLengths(options, devices.H200), np.random.default_rng(3), set()
    for _ in range(300):
        count, most = int(rng.choice([1, 3, 40])), int(rng.choice([2, 9, 30, 200, 3000]))
        rows = np.full(count, most - 1) if rng.random() < 0.5 else rng.integers(0, most, count)
        tokens = rows + rng.integers(0, 4000, count)
        batch = Batch(rows, tokens)
        arrays = arrays_of(batch, use_kv_lens=True)
        call = PlanCall(problem_of(batch, arrays), native.Schedule())
        call.struct.context_table = contexts.address
        expected = contexts.of(rows.tolist(), tokens.tolist())
        assert contexts.of_batch(call.address) is expected, (rows, tokens)
        found.add(expected)
    assert len(found) > 2


@pytest.mark.parametrize("is_built", [True, False])
def test_a_batch_has_the_usual_tile_if_that_of_its_class_is_not_built(
    is_built: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = context_row(ContextClass.SHORT, ANY_ROWS, 0)
    kernels = [dataclasses.replace(kernel, context_rows=lambda *_: [row]) for kernel in ATTENTION]
    monkeypatch.setattr(context_lengths, "ATTENTION", kernels)
    asked: list[ContextClass] = []

    def prepared(*arguments: Any) -> prepared_kernels.PreparedKernels:
        asked.append(arguments[4])
        if arguments[4] is ContextClass.SHORT or not is_built:
            raise KernelMissingError("not built")
        return original(*arguments)

    original = prepared_kernels.PreparedKernels
    monkeypatch.setattr(prepared_kernels, "PreparedKernels", prepared)
    wrapper = BatchPrefillWithPagedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8))
    lengths = (torch.tensor([0, 5]), torch.tensor([0, 1]), torch.zeros(1, dtype=torch.int32), torch.tensor([9]))
    with contextlib.nullcontext() if is_built else pytest.raises(KernelMissingError):
        for _ in range(2):  # the second plan does not ask again
            wrapper.plan(*lengths, 2, 1, 64, 16, q_data_type=torch.float32)
    assert asked == [ContextClass.SHORT, ContextClass.USUAL]
