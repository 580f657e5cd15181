"""Plans for every card that the table names, and for odd numbers of SMs: tiles fit the card, and plans hold."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from planner_batches import Batch, Cutting, plan
from planner_checks import check, check_balance
from profiles import PROFILES

from flashpage import native
from flashpage.base.dtypes import DType
from flashpage.errors import PlanError, SettingError
from flashpage.kernels import choose, devices, latent_formats, schedules
from flashpage.kernels.context_classes import ContextClass
from flashpage.kernels.options import Options
from flashpage.kernels.work import Problem

RNG = np.random.default_rng(0)
DECODES = (np.full(64, 4096), RNG.lognormal(7.0, 1.0, 40).astype(np.int64) + 1, np.array([100_000]))
PREFILLS = (
    ([300, 1, 0, 64, 129, 7], [1024, 5000, 300, 64, 100, 0]),
    ([8192], [8192]),
    ([2048] * 3, [9000, 2048, 4096]),
)
PARTS = ("H100:1", "H100:2", "H100:3", "RTX 4090:1", "RTX 4090:7", "RTX 4090:46")
SMS = (1, 2, 3, 7, 16, 46, 78, 114, 170)


def test_numbers_of_sms() -> None:
    """Cards above and parts of cards have all of these numbers, and no row of the table has another by mistake."""
    assert {devices.named(name).sms for name in (*PROFILES, *PARTS)} >= set(SMS)
    known = {"RTX 3090": 82, "RTX 4090": 128, "L40S": 142, "RTX 5090": 170, "GB10": 48, "A100": 108, "H100": 132}
    known |= {"H100 PCIe": 114, "H20": 78, "B200": 148}
    assert {name: devices.named(name).sms for name in known} == known


@pytest.mark.parametrize("name", [*PROFILES, *PARTS])
def test_plans_hold(name: str) -> None:
    """Decode and prefill batches, with the tile, the costs and the CTAs of the card."""
    card = devices.named(name)
    for heads, dim in (((32, 8), 128), ((6, 6), 256), ((64, 1), 64)):
        for kv_lens in DECODES:
            _check(Batch(np.ones_like(kv_lens), kv_lens, *heads), dim, card)
        for rows, tokens in PREFILLS:
            _check(Batch(np.array(rows), np.array(tokens), *heads, causal=True), dim, card)


@pytest.mark.parametrize("row_format", ["plain", "scaled", *latent_formats.PACKED])
@pytest.mark.parametrize("name", [*PROFILES, *PARTS, "H200", "H100:4", "H100:46"])
def test_plans_of_latent_rows_hold(name: str, row_format: str) -> None:
    """Decode, drafts and a prompt, with few and many heads, over pages with boxes and without, and over lists."""
    card = devices.named(name)
    stored = DType.BFLOAT16 if row_format == "plain" else DType.FLOAT8_E4M3
    columns = 512 if row_format == "deepseek_v4" else 576
    for heads, (source, page_size) in itertools.product(
        (16, 64, 128), (("latent", 64), ("latent", 1), ("selected", 64))
    ):
        types = (DType.BFLOAT16, stored, DType.BFLOAT16)
        options = Options(source, heads, 1, columns, 512, page_size, *types, latent_format=row_format)
        for kv_lens in DECODES:
            _check_options(Batch(np.ones_like(kv_lens), kv_lens, heads, 1), options, card)
        if source == "latent":
            for rows, tokens in (([2] * 5, [900, 1, 0, 64, 20_000]), PREFILLS[0]):
                batch = Batch(np.array(rows), np.array(tokens), heads, 1, causal=True)
                _check_options(batch, dataclasses.replace(options, causal=True), card)


@pytest.mark.parametrize("sms", SMS[:4])
def test_units_need_no_more_sms_than_there_are(sms: int) -> None:
    """A card with fewer SMs than a pair of CTAs, or two pairs side by side, has other tiles or another kernel."""
    card, whole = devices.named(f"H100:{sms}"), devices.named("H100")
    types = [DType.BFLOAT16] * 3
    latent = Options("latent", 128, 1, 576, 512, 64, *types, causal=True)
    plain = Options("paged", 32, 8, 128, 128, 16, *types, causal=True)
    used = set()
    for options, contexts, packed in itertools.product((latent, plain), ContextClass, (16, 64, 128, 256, 4096)):
        for rows in (0, 1, 2, 4):
            problem = Problem(dataclasses.replace(options, uniform_q_len=rows), packed, contexts=contexts)
            assert choose.choose_for_card(problem, card).spec.ctas <= sms
            used.add(choose.choose_for_card(problem, whole).spec.ctas)
    assert used == {1, 2, 4}
    if sms == 1:
        reasons = choose.choose_for_card(Problem(latent, 128), card).reasons
        assert any("latent_wide_sm90: its unit needs 2 SMs, this card has 1" in line for line in reasons)


def _check(batch: Batch, dim: int, card: devices.Device) -> None:
    options = Options(
        "paged", batch.num_q_heads, batch.num_kv_heads, dim, dim, 16, *[DType.BFLOAT16] * 3, causal=batch.causal
    )
    _check_options(batch, options, card)


def _check_options(batch: Batch, options: Options, card: devices.Device) -> None:
    uniform = int(batch.q_lens[0]) if len(set(batch.q_lens.tolist())) == 1 and batch.q_lens[0] <= 2 else 0
    options = dataclasses.replace(options, uniform_q_len=uniform)
    packed = choose.packed_rows(options, len(batch.q_lens), int(batch.q_lens.sum()))
    choice = choose.choose_for_card(Problem(options, packed), card)
    tile = choice.spec.tile
    assert tile is not None and tile.shared_limit <= card.shared_bytes
    info = native.KernelInfo(num_sms=132, ctas_per_sm=tile.ctas_per_sm)
    ctas = schedules.resident_ctas(info, card) // choice.spec.ctas
    found = schedules.schedule(choice, options, ctas)
    assert found.num_ctas in (card.sms * tile.ctas_per_sm, card.sms * tile.ctas_per_sm // choice.spec.ctas)
    values = {field.name: getattr(found, field.name) for field in dataclasses.fields(Cutting)}
    cutting = Cutting(**values | {"clusters": tuple(found.clusters)})
    planned = plan(batch, cutting)
    check_balance(planned, check(planned))


@pytest.mark.parametrize("sms", SMS)
def test_a_part_of_a_card(sms: int) -> None:
    whole = devices.named("RTX 5090")
    part = devices.named(f"rtx 5090:{sms}")
    assert (part.sms, part.name, part.shared_bytes) == (sms, whole.name, whole.shared_bytes)
    assert part.sm_bytes_per_ns == pytest.approx(whole.sm_bytes_per_ns) and part.gbps * 170 == whole.gbps * sms


@pytest.mark.parametrize("name", ["H100:0", "H100:133", "H100:x", "H100:²", "H100:" + "9" * 50])
def test_no_part_of_a_card(name: str) -> None:
    with pytest.raises(PlanError, match="is no part of a card: pass 1 to 132 SMs"):
        devices.named(name)


def test_a_profile_that_the_card_can_run() -> None:
    assert devices.as_card("rtx 4090", devices.H200) is devices.named("RTX 4090")
    for name, own, missing in (
        ("B200", devices.named("A100"), "fp8 mma, clusters, bulk copies, PDL, 232448 bytes of shared memory a CTA"),
        ("H100", devices.named("B200"), "wgmma"),
        ("A100", devices.named("L4"), "166912 bytes of shared memory a CTA"),
    ):
        with pytest.raises(SettingError, match=f"a card without {missing}, which {own.name} lacks"):
            devices.as_card(name, own)


def test_ctas_of_a_profile() -> None:
    """The driver of an H200 counts the CTAs of its own SM; the profile's SM has less shared memory."""
    info = native.KernelInfo(num_sms=132, ctas_per_sm=3, shared_bytes=60 << 10, clusters=(396, 198, 99, 48, 20))
    assert schedules.resident_ctas(info, devices.H200) == 3 * 132
    assert schedules.resident_ctas(info, devices.named("A100")) == 2 * 108
    assert schedules.resident_ctas(info, devices.named("RTX 4090")) == 128
    info.cluster_rows = 16
    assert schedules.Clusters.of(info, devices.H200).resident == (396, 198, 99, 48, 20)
    assert schedules.Clusters.of(info, devices.named("H100:16")).resident == (48, 24, 12, 6, 3)
    assert schedules.Clusters.of(info, devices.named("A100")) == schedules.NO_CLUSTERS
