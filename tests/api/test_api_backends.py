"""The table of kernels: what each row refuses, and which tiles and slots follow from a row."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
from typing import Any

import pytest
import torch

import flashpage
from aot import plans
from flashpage.base.dtypes import DType
from flashpage.kernels import ATTENTION, choose, cpu_attention, devices, prefill_sm89, schedules
from flashpage.kernels import tile as tiles
from flashpage.kernels.context_classes import ContextClass
from flashpage.kernels.decode_sm90 import KERNEL as DECODE_SM90
from flashpage.kernels.kernel import AttentionKernel
from flashpage.kernels.options import SPLIT_BALANCED, SPLIT_NEVER, Options
from flashpage.kernels.prefill_sm90 import KERNEL as PREFILL_SM90
from flashpage.kernels.spec import KernelSpec, VariantSpec
from flashpage.kernels.work import Problem, Work
from flashpage.plan.prepared_kernels import mask_tiles_spec

BF16 = DType.BFLOAT16
DECODE = Options("paged", 32, 8, 128, 128, 16, BF16, BF16, BF16, uniform_q_len=1)

SHORT_RING = "with 99 KiB of shared memory a CTA its ring is short, and attention_sm80 is faster"
UNLIKE_FP8_QUERIES = "kv_data_type bfloat16 is neither q's float8_e5m2 nor fp8 (float8_e4m3fn, float8_e5m2)"


CARD_OF = {80: devices.named("A100"), 90: devices.H200, 100: devices.named("B200"), 120: devices.named("RTX 5090")}


def problem(packed_rows: int = 4, **changed: Any) -> Problem:
    return Problem(dataclasses.replace(DECODE, **changed), packed_rows)


@pytest.mark.parametrize(
    ("given", "sm", "reason"),
    [
        (problem(), 90, ""),
        (problem(64), 90, ""),
        (problem(kv_dtype=DType.FLOAT8_E4M3), 90, ""),
        (problem(q_dtype=DType.FLOAT8_E4M3, kv_dtype=DType.FLOAT8_E5M2), 90, ""),
        (problem(q_dtype=DType.FLOAT8_E5M2), 90, UNLIKE_FP8_QUERIES),
        (problem(position_encoding="ALIBI"), 90, ""),
        (problem(has_mask=True), 90, ""),
        (problem(), 80, "it needs bulk copies (compute capability 9.0 on), this card has 8.0"),
        (problem(), 100, ""),
        (problem(), 120, SHORT_RING),
        (problem(128), 90, "a request and KV head have 128 packed rows (query rows x query heads), it takes 64"),
        (problem(position_encoding="ROPE_LLAMA"), 90, ""),
        (problem(out_dtype=DType.FLOAT32), 90, "o_data_type float32 is not among float16, bfloat16, float8_e4m3fn"),
    ],
)
def test_what_the_hopper_decode_kernel_refuses(given: Problem, sm: int, reason: str) -> None:
    assert DECODE_SM90.refusals(Work(given, CARD_OF[sm])) == ([reason] if reason else [])


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, ""),
        ({"page_size": 1}, ""),
        ({"q_dtype": DType.FLOAT16, "kv_dtype": DType.FLOAT16, "head_dim_qk": 192}, ""),
        (
            {"kv_dtype": DType.FLOAT8_E4M3},
            "it has no in-kernel RoPE (pos_encoding_mode ROPE_LLAMA) over kv_data_type float8_e4m3fn",
        ),
    ],
)
def test_where_the_hopper_prefill_kernel_rotates(changed: dict[str, Any], reason: str) -> None:
    given = problem(128, position_encoding="ROPE_LLAMA", **changed)
    assert PREFILL_SM90.refusals(Work(given, devices.H200)) == ([reason] if reason else [])


@pytest.mark.parametrize("dims", [(16, 16), (64, 64), (72, 72), (128, 128), (192, 128), (128, 256), (256, 256)])
@pytest.mark.parametrize("has_mask", [False, True])
@pytest.mark.parametrize("page_size", [1, 16])
def test_four_warps_turn_as_many_rows_of_a_tile(dims: tuple[int, int], has_mask: bool, page_size: int) -> None:
    sizes = {"head_dim_qk": dims[0], "head_dim_vo": dims[1], "page_size": page_size, "has_mask": has_mask}
    given = problem(128, position_encoding="ROPE_LLAMA", **sizes)
    tile = PREFILL_SM90.tile(Work(given, devices.H200, mask_source="packed_bits" if has_mask else "implicit"))
    assert tile.tile_q == 128 and tile.tile_kv % 32 == 0
    lane_rows = tile.tile_kv // 4 // max(1, min(8, 1 << (32 // (dims[0] // 8)).bit_length() - 1))
    assert lane_rows in (2, 4) or lane_rows % 8 == 0


@pytest.mark.parametrize(
    ("changed", "loader"),
    [
        ({}, "boxes"),
        ({"page_size": 8}, "boxes"),
        ({"page_size": 48}, "boxes"),
        ({"page_size": 1}, "rows"),
        ({"page_size": 12}, "rows"),
        ({"kv_source": "ragged", "page_size": 0}, "boxes"),
        ({"head_dim_vo": 72}, "rows"),  # its lines are not filled
        ({"head_dim_qk": 96, "head_dim_vo": 96, "kv_dtype": DType.FLOAT8_E4M3}, "rows"),
        ({"head_dim_qk": 160, "kv_dtype": DType.FLOAT8_E4M3}, "boxes"),
        ({"head_dim_qk": 80, "num_q_heads": 4, "num_kv_heads": 1}, "boxes"),
        ({"head_dim_vo": 72, "kv_dtype": DType.FLOAT8_E4M3}, "rows"),
        ({"head_dim_qk": 24, "kv_dtype": DType.FLOAT8_E5M2}, "rows"),
    ],
)
def test_boxes_are_taken_where_pages_and_rows_are_whole(changed: dict[str, Any], loader: str) -> None:
    assert DECODE_SM90.loader(problem(**changed).options) == loader


@pytest.mark.parametrize(
    ("changed", "loader"),
    [
        ({}, "transposed"),
        ({"kv_source": "ragged", "page_size": 0}, "transposed"),
        ({"head_dim_qk": 192, "head_dim_vo": 96}, "transposed"),
        ({"has_mask": True}, "converted"),
        ({"page_size": 4}, "converted"),
        ({"head_dim_vo": 72}, "converted"),
        ({"q_dtype": BF16}, "converted"),
        ({"q_dtype": DType.FLOAT8_E5M2}, "converted"),
        ({"q_dtype": DType.FLOAT8_E5M2, "kv_dtype": DType.FLOAT8_E5M2}, "converted"),
        ({"q_dtype": BF16, "kv_dtype": BF16}, "boxes"),
    ],
)
def test_fp8_is_multiplied_where_boxes_of_e4m3_are(changed: dict[str, Any], loader: str) -> None:
    given: dict[str, Any] = {"q_dtype": DType.FLOAT8_E4M3, "kv_dtype": DType.FLOAT8_E4M3, "page_size": 16}
    options = problem(**given | {"head_dim_qk": 128, "head_dim_vo": 128} | changed).options
    assert PREFILL_SM90.loader(options) == loader
    assert PREFILL_SM90.visits_mask_tiles(options) == (loader == "boxes")
    source = "packed_bits" if options.has_mask else "implicit"
    tile = PREFILL_SM90.tile(Work(Problem(options, 128), devices.H200, mask_source=source))
    assert tile.tile_kv % (32 if loader == "transposed" else 16) == 0


@pytest.mark.parametrize("kernel", ATTENTION, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("card", devices.CARDS, ids=lambda card: card.name)
def test_a_kernel_has_a_tile_for_all_that_it_accepts(kernel: AttentionKernel, card: devices.Device) -> None:
    card = devices.CPU if kernel.backend == "cpu" else card
    accepted = 0
    dims_of = {"paged": ((64, 64), (128, 128), (192, 128), (256, 256), (512, 512)), "latent": ((576, 512), (320, 256))}
    for rows, page_size in itertools.product((1 << i for i in range(11)), (1, 16)):
        for source, (qk, vo) in ((source, dims) for source, found in dims_of.items() for dims in found):
            for q_dtype, kv_dtype in ((BF16, BF16), (BF16, DType.FLOAT8_E4M3), (DType.FLOAT8_E4M3,) * 2):
                sizes = {"head_dim_qk": qk, "head_dim_vo": vo, "page_size": page_size, "kv_source": source}
                is_scaled = source == "latent" and kv_dtype is not q_dtype
                kinds = {"q_dtype": q_dtype, "kv_dtype": kv_dtype, "latent_format": "scaled" if is_scaled else "plain"}
                work = Work(problem(rows, **sizes, **kinds), card)
                if not kernel.refusals(work):
                    accepted += 1
                    tile = kernel.tile(work)
                    assert tile.tile_q % 8 == 0 and tile.tile_kv % 16 == 0 and kernel.cost(work, tile).ns_per_token > 0
    takes_part = not kernel.archs or card.sm in kernel.archs
    if kernel is prefill_sm89.KERNEL:
        takes_part = "fp8 mma" in card.abilities and not card.widens_fp8
    assert bool(accepted) == takes_part


@pytest.mark.parametrize(("page_size", "tokens"), [(16, 16), (1, 32)])
def test_a_variant_that_loads_has_short_slots_where_boxes_fill_them(page_size: int, tokens: int) -> None:
    def slot(variant: VariantSpec) -> int:
        return DECODE_SM90.tile(Work(problem(page_size=page_size), devices.H200, variant)).tile_kv

    bias = (("bias", "float32", 3),)
    assert slot(VariantSpec(logit="score + bias(h, q_idx, kv_idx)", tensors=bias)) == tokens
    assert slot(VariantSpec(mask="bias(h, q_idx, kv_idx) > 0", tensors=bias)) == 32


FUNCTION, SCORES = VariantSpec(mask="kv_idx < 7 * h"), VariantSpec(logit="score * 2.0f")
FUNCTION_TILES = KernelSpec("mask_tiles", mask_source="function", variant=FUNCTION, tile=tiles.Tile(128, 112, 8, 1, 2))


@pytest.mark.parametrize(
    ("changed", "variant", "is_known", "source", "kernel"),
    [
        ({}, FUNCTION, True, "function", FUNCTION_TILES),
        ({}, FUNCTION, False, "implicit", None),
        ({"kv_dtype": DType.FLOAT8_E4M3}, FUNCTION, True, "implicit", None),
        ({"position_encoding": "ROPE_LLAMA"}, FUNCTION, True, "implicit", None),
        ({}, SCORES, True, "implicit", None),
        ({"has_mask": True}, FUNCTION, True, "packed_bits", KernelSpec("mask_tiles", mask_source="packed_bits")),
        ({"has_mask": True, "kv_dtype": DType.FLOAT8_E4M3}, FUNCTION, True, "packed_bits", None),
        ({"has_mask": True, "position_encoding": "ROPE_LLAMA"}, FUNCTION, True, "packed_bits", None),
    ],
)
def test_which_kernels_get_tiles_of_functions(
    changed: dict[str, Any],
    variant: VariantSpec,
    is_known: bool,
    source: str,
    kernel: KernelSpec | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Plans look for a mask function's tiles if the host knows the lengths of each run."""
    monkeypatch.setattr(devices, "of", lambda _: devices.H200)
    given = dataclasses.replace(problem(4096, page_size=16, **changed), has_known_lengths=is_known)
    choice = choose.choose(given, torch.device("cuda:0"), variant)
    assert (choice.spec.kernel, choice.spec.mask_source) == ("prefill_sm90", source)
    assert mask_tiles_spec(choice, given.options) == kernel
    notes = [note for note in choice.reasons if note.startswith("mask: ")]
    assert len(notes) == (1 if variant.mask or given.options.has_mask else 0)
    assert kernel is None or "this kernel skips" in notes[0]
    decode = choose.choose(dataclasses.replace(given, packed_rows=4), torch.device("cuda:0"), variant)
    assert (decode.spec.kernel, decode.spec.mask_source) == ("decode_sm90", source.replace("function", "implicit"))


@pytest.mark.parametrize(
    ("group", "changed", "rows"),
    [
        *((group, {}, rows) for group, rows in ((1, 128), (3, 126), (5, 125), (7, 126), (12, 120), (13, 117))),
        *((group, {}, 128) for group in (8, 28, 48, 128, 200)),  # 28 would be 112 by the rule of the rows above
        (5, {"head_dim_qk": 64, "head_dim_vo": 64}, 190),
        (5, {"page_size": 1}, 125),
        (5, {"position_encoding": "ROPE_LLAMA"}, 125),
        (5, {"has_mask": True}, 128),  # a mask's tiles are looked up by row tile
        (5, {"kv_dtype": DType.FLOAT8_E4M3}, 128),  # Q is converted row by row
        (5, {"q_dtype": DType.FLOAT8_E4M3, "kv_dtype": DType.FLOAT8_E4M3}, 125),
    ],
)
def test_units_have_whole_rows_of_a_group(
    group: int, changed: dict[str, Any], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If boxes load Q, a unit has whole rows of a group; each CTA of a pair has equally many."""
    monkeypatch.setattr(devices, "of", lambda _: devices.H200)
    dims = {"page_size": 16, "head_dim_qk": 128, "head_dim_vo": 128}
    given = problem(4096, **{**dims, "num_q_heads": 2 * group, "num_kv_heads": 2, **changed})
    for is_long in (False, True):
        long = dataclasses.replace(given, contexts=ContextClass.LONG if is_long else ContextClass.USUAL)
        choice = choose.choose(long, torch.device("cuda:0"), VariantSpec())
        assert choice.spec.kernel == "prefill_sm90"
        schedule = schedules.schedule(choice, given.options, 132)
        assert schedule.tile_q == rows * choice.spec.ctas


SPLITS = (SPLIT_BALANCED, SPLIT_NEVER, 256)
BATCHES = [(batch, rows) for batch in (0, 1, 7, 256) for rows in (0, batch, 5 * batch, 3000)]


@pytest.mark.parametrize("sm", CARD_OF)
@pytest.mark.parametrize("q_len", [0, 1, 3, 16, 64])  # 0: a prefill wrapper
@pytest.mark.parametrize("group", [1, 2, 7, 8, 32, 128])
@pytest.mark.parametrize("split", SPLITS)
def test_the_batch_does_not_choose_kernel_or_tile(
    split: int, group: int, q_len: int, sm: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batch-invariant plans, and plans whose requests all have the same number of rows."""
    monkeypatch.setattr(devices, "of", lambda _: CARD_OF[sm])
    options = dataclasses.replace(
        DECODE, num_q_heads=2 * group, num_kv_heads=2, uniform_q_len=q_len, fixed_piece_tokens=split
    )

    def chosen(batch: int, total_rows: int) -> tuple[KernelSpec, bytes]:
        rows = choose.packed_rows(options, batch, total_rows)
        choice = choose.choose(Problem(options, rows), torch.device("cuda:0"))
        return choice.spec, bytes(schedules.schedule(choice, options, 132))

    choices = {chosen(batch, q_len * batch or rows) for batch, rows in BATCHES}
    if split == SPLIT_BALANCED and not q_len:
        assert len(choices) > 1  # other plans do depend on the batch
    else:
        assert len(choices) == 1
        few = sm in DECODE_SM90.archs and (q_len or 64) * group <= 64
        many = "prefill_sm90" if sm == 90 else "attention_sm80"
        assert choices.pop()[0].kernel == ("decode_sm90" if few else many)


def test_a_card_need_not_be_here() -> None:
    def chosen(given: Problem, card: str = "H200") -> str:
        return choose.choose_for_card(given, devices.named(card)).kernel.name

    assert chosen(problem()) == chosen(problem(position_encoding="ROPE_LLAMA")) == "decode_sm90"
    for changed in ({"page_size": 16}, {"page_size": 12}, {"kv_dtype": DType.FLOAT8_E4M3}):
        assert chosen(problem(128, **changed)) == "prefill_sm90"
    assert chosen(problem(128, position_encoding="ROPE_LLAMA")) == "prefill_sm90"
    fp8_rope = problem(128, position_encoding="ROPE_LLAMA", kv_dtype=DType.FLOAT8_E4M3)
    assert chosen(problem(), "B200") == "decode_sm90"
    assert {chosen(problem(), card) for card in ("RTX 4090", "RTX 5090", "GB10")} == {"attention_sm80"}
    for card in ("B200", "RTX 4090", "RTX 5090"):
        assert chosen(fp8_rope) == chosen(problem(128), card) == "attention_sm80"
    assert choose.choose_for_card(problem(q_dtype=BF16), devices.CPU).kernel.name == "cpu_attention"
    with pytest.raises(flashpage.CapabilityError, match="head_dim_qk 576 is not a multiple of 8 from 16 to 512"):
        chosen(problem(head_dim_qk=576))


def test_every_card_takes_the_same_plans() -> None:
    """Whether a plan is served does not depend on the card: what one kernel refuses there, another takes."""
    lot, served = random.Random(0), 0
    for _ in range(400):
        plan, kernels = plans.drawn(lot), {}
        for card in (*CARD_OF.values(), devices.named("RTX 4090")):
            with contextlib.suppress(flashpage.CapabilityError):
                kernels[card.name] = choose.choose_for_card(plan.problem, card, plan.variant).kernel.name
        assert len(kernels) in (0, len(CARD_OF) + 1), (plan, kernels)
        served += bool(kernels)
    assert 100 < served < 400


def test_a_spec_is_named_by_loader_and_trace() -> None:
    spec = KernelSpec("decode_sm90", tile=tiles.Tile(16, 64, 1, 4, 3), loader="boxes", trace=True)
    assert "-boxes-trace-" in spec.name
    assert KernelSpec.from_json(spec.to_json()) == spec


@pytest.mark.parametrize("merges_in_launch", [False, True])
def test_who_merges_in_its_launch_is_given_no_merge(merges_in_launch: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = dataclasses.replace(cpu_attention.KERNEL, merges_in_launch=merges_in_launch)
    monkeypatch.setattr(choose, "ATTENTION", [kernel])
    wrapper = flashpage.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8))
    pages = torch.arange(40, dtype=torch.int32)
    lengths = torch.tensor([0, 40], dtype=torch.int32), pages, torch.tensor([16], dtype=torch.int32)
    wrapper.plan(*lengths, 4, 2, 64, 16, q_data_type=torch.float32, fixed_split_size=8)  # five pieces
    wrapper.run(torch.zeros(1, 4, 64), torch.zeros(40, 2, 16, 2, 64))
    structs = wrapper._attention._local.bound
    assert structs.option_plan.parts[0].num_merges > 0
    assert structs.args.count == (1 if merges_in_launch else 2)


def test_a_capability_that_a_kernel_is_not_built_for_gets_another_kernel() -> None:
    """A later card may have all that a kernel needs, but no target for which it was compiled."""
    card = dataclasses.replace(devices.named("B200"), sm=130)
    assert any("not built for compute capability 13.0" in why for why in DECODE_SM90.refusals(Work(problem(1), card)))
