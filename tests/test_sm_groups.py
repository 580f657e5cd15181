"""Which SMs share a group, as a simulated card's clusters tell it, what that makes of their speeds, and who asks."""

from __future__ import annotations

import ctypes
import dataclasses
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch

from flashpage import backends, host, jit, prepare, sm_groups
from flashpage.dtypes import DType
from flashpage.errors import KernelMissingError
from flashpage.jit import compilers
from flashpage.problem import Options

CUDA = torch.device("cuda:0")
H200 = sm_groups.MEASURED["NVIDIA H200"]
DECODE = Options("paged", 32, 8, 128, 128, 16, *(DType.BFLOAT16,) * 3, uniform_q_len=1)


def groups_of(sizes: Sequence[int]) -> list[list[int]]:
    """Groups whose SM numbers take turns, in pairs, as a card's do."""
    groups: list[list[int]] = [[] for _ in sizes]
    sm = 0
    while sm < sum(sizes):
        for group, size in zip(groups, sizes, strict=True):
            if len(group) < size:
                group += [sm, sm + 1]
                sm += 2
    return groups


class Card:
    """The host library as far as sm_groups calls it. Clusters take the first SMs of a group and no others, which links
    least of all."""

    def __init__(self, sizes: Sequence[int], name: str = "NVIDIA H200", refused: Sequence[int] = ()) -> None:
        self.groups, self.name, self.refused = groups_of(sizes), name, refused
        self.launches: list[int] = []

    def fp_cuda_device_info(self, device: int, info) -> int:
        info._obj.name, info._obj.num_sms = self.name.encode(), sum(map(len, self.groups))
        return host.OK

    def fp_cuda_cluster_sms(self, handle: int, size: int, num_ctas: int, sms) -> int:
        self.launches.append(size)
        if size in self.refused or num_ctas == 0:
            return host.CUDA_ERROR
        places = self.clusters(size)
        for i in range(num_ctas // size):
            sms[i * size : (i + 1) * size] = places[i % len(places)]
        return host.OK

    def clusters(self, size: int) -> list[list[int]]:
        return [group[i : i + size] for group in self.groups for i in range(0, len(group) // size * size, size)]

    def insert(self, monkeypatch: pytest.MonkeyPatch) -> Card:
        sm_groups._speeds.cache_clear()
        monkeypatch.setattr(host, "load", lambda: self)
        monkeypatch.setattr(jit, "get_kernel", lambda spec, device: SimpleNamespace(handle=1, spec=spec))
        return self


@pytest.fixture(autouse=True)
def fresh():
    yield
    sm_groups._speeds.cache_clear()


@pytest.mark.parametrize(
    "sizes", [(18,) * 6 + (12,) * 2, (18,) * 2 + (16,) * 6, (18,) * 4 + (16,) * 2 + (14,) * 2, (4, 6, 8, 10, 12)]
)
def test_clusters_of_all_sizes_link_whole_groups(sizes: tuple[int, ...]) -> None:
    card = Card(sizes)
    clusters = [cluster for size in sm_groups._CLUSTERS for cluster in card.clusters(size)]
    for order in (clusters, clusters[::-1]):
        found = sm_groups.unite(order, sum(sizes))
        assert sorted(map(sorted, found)) == sorted(map(sorted, card.groups))


@pytest.mark.parametrize(
    ("clusters", "num_sms"),
    [
        ([], 8),
        ([(0, 1, 2, 3)], 8),  # four SMs were not seen
        ([(0, 1, 2, 3), (4, 5, 6, 8)], 8),  # a number past the last
        ([(0, 1, 2, 3, 4), (5, 6, 7, 8, 9)], 10),  # odd: a group is whole pairs
        ([(0, 1, 2, 3, 4, 5), (6, 7)], 8),  # two SMs that nothing linked
    ],
)
def test_what_cannot_be_whole_groups_is_given_up(clusters: list[tuple[int, ...]], num_sms: int) -> None:
    assert sm_groups.unite([(0, 1, 2, 3), (4, 5, 6, 7)], 8) == [{0, 1, 2, 3}, {4, 5, 6, 7}]
    assert sm_groups.unite(clusters, num_sms) is None


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((18,) * 6 + (12,) * 2, {18: 34.5, 12: 38.92}),  # 18s bounded by their groups, 12s by what is left
        ((18,) * 2 + (16,) * 6, {18: 34.5, 16: 35.6}),
        ((18,) * 7 + (6,), {18: 34.5, 6: 52.17}),
        ((16,) * 8, {16: 36.41}),  # the memory bounds all
        ((18, 12), {18: 34.5, 12: 51.75}),  # groups bound all
        ((12,) * 10 + (10,), {12: 35.85, 10: 35.85}),
    ],
)
def test_rates_fill_the_memory_and_no_group_beyond_its_share(sizes: tuple[int, ...], expected: dict) -> None:
    found = sm_groups.rates(sizes, H200)
    assert found == pytest.approx(expected, abs=0.01)
    assert sum(found[size] * size for size in sizes) <= H200.whole * 1.000001
    assert all(found[size] * size <= H200.group * 1.000001 for size in sizes)


@pytest.mark.parametrize(("sizes", "ratio"), [((18,) * 6 + (12,) * 2, 1.127), ((18,) * 2 + (16,) * 6, 1.032)])
def test_speeds_are_by_sm_number(sizes: tuple[int, ...], ratio: float, monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(sizes).insert(monkeypatch)
    speeds = sm_groups.speeds(CUDA)
    assert speeds is not None and len(speeds) == sum(sizes)
    assert min(speeds) == 1.0 and max(speeds) == pytest.approx(ratio, abs=0.02)
    small = Counter(sizes)[min(sizes)] * min(sizes)
    assert Counter(speeds) == {1.0: sum(sizes) - small, max(speeds): small}
    for group in card.groups:
        assert len({speeds[sm] for sm in group}) == 1
        assert (speeds[group[0]] > 1) == (len(group) == min(sizes))
    launches = len(card.launches)
    assert sm_groups.speeds(CUDA) is speeds and len(card.launches) == launches  # asked once a process


@pytest.mark.parametrize(
    "card",
    [
        Card((18,) * 6 + (12,) * 2, refused=range(9)),
        Card((18,) * 6 + (12,) * 2, refused=(8, 7, 6, 5)),
        Card((16,) * 8),
        Card((12,) * 10 + (10,)),
    ],
    ids=["no clusters", "too small clusters", "alike", "bounded by the memory"],
)
def test_all_alike_or_unknown_is_none(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    card.insert(monkeypatch)
    assert sm_groups.speeds(CUDA) is None
    assert card.launches


def test_a_card_that_was_not_measured_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NVIDIA H100 80GB HBM3", "NVIDIA H200 MIG 3g.71gb"):
        card = Card((18,) * 6 + (12,) * 2, name).insert(monkeypatch)
        assert sm_groups.speeds(CUDA) is None and not card.launches
    assert sm_groups.speeds(torch.device("cpu")) is None


def test_where_the_kernel_cannot_be_had_all_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card((18,) * 6 + (12,) * 2).insert(monkeypatch)

    def missing(spec, device) -> None:
        raise KernelMissingError(spec.name)

    monkeypatch.setattr(jit, "get_kernel", missing)
    assert sm_groups.speeds(CUDA) is None and not card.launches


def test_the_kernel_compiles_for_every_architecture(tmp_path) -> None:
    found = [compiler for compiler in (compilers.find_nvcc(), compilers.find_nvrtc()) if compiler]
    if not found:
        pytest.skip("neither nvcc nor NVRTC is here")
    targets = [jit.Target.parse(name) for name in ("sm_80", "sm_90a", "compute_80")]
    results = jit.build_kernels([(sm_groups.SPEC, target) for target in targets], tmp_path, compiler=found[0])
    assert [str(result.error) for result in results if result.error] == []


# ---------------------------------------------------------------- who asks


def prepared(monkeypatch: pytest.MonkeyPatch, speeds, options: Options = DECODE, packed_rows: int = 4):
    info = host.KernelInfo(num_sms=132, ctas_per_sm=1)
    monkeypatch.setattr(jit, "get_kernel", lambda spec, device: SimpleNamespace(handle=1, info=info, spec=spec))
    monkeypatch.setattr(backends, "device_sm", lambda _: 90)
    monkeypatch.setattr(sm_groups, "speeds", lambda _: speeds)
    return prepare.Prepared(options, packed_rows, CUDA)


def speeds_of(count: int):
    return (ctypes.c_float * count)(*(1.0 + i % 2 / 8 for i in range(count)))


def test_the_hopper_decode_kernel_is_planned_by_sm(monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = speeds_of(132)
    found = prepared(monkeypatch, speeds)
    assert found.choice.spec.kernel == "decode_sm90"
    assert found.schedule.cta_speeds == ctypes.addressof(speeds) and found.speeds is speeds
    assert found.schedule.min_by_sm_ns == 20_000


@pytest.mark.parametrize(
    ("speeds", "changed", "packed_rows"),
    [
        (None, {}, 4),  # all alike
        (speeds_of(264), {}, 4),  # of another number of CTAs
        (speeds_of(132), {"fixed_piece_tokens": 1024}, 4),
        (speeds_of(132), {"fixed_piece_tokens": -1}, 4),
        (speeds_of(132), {"uniform_q_len": 0}, 128),  # the general kernel
    ],
)
def test_others_are_planned_as_if_all_were_alike(speeds, changed, packed_rows, monkeypatch) -> None:
    found = prepared(monkeypatch, speeds, dataclasses.replace(DECODE, **changed), packed_rows)
    assert not found.schedule.cta_speeds and not found.schedule.min_by_sm_ns
    assert found.speeds is None
