"""Classes of SMs from noisy speeds, what they make of the memory's bandwidth, and who asks."""

from __future__ import annotations

import ctypes
import dataclasses
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from flashpage import backends, host, jit, prepare, sm_speeds
from flashpage.dtypes import DType
from flashpage.errors import KernelMissingError
from flashpage.jit import compilers
from flashpage.problem import Options

CUDA = torch.device("cuda:0")
H200 = sm_speeds.MEASURED["NVIDIA H200"]
DECODE = Options("paged", 32, 8, 128, 128, 16, *(DType.BFLOAT16,) * 3, uniform_q_len=1)
TWO_CLASSES = {1.0: 108, 1.5: 24}


def noisy(classes: dict[float, int], noise: float = 0.03, seed: int = 0) -> np.ndarray:
    """GB/s of each SM, [SMs], in random order; 1.0 is 41 GB/s. The noise is the normal distribution's."""
    random = np.random.default_rng(seed)
    values = 41.0 * np.repeat(list(classes), list(classes.values()))
    values *= 1 + noise * random.standard_normal(len(values)).clip(-3, 3)
    return random.permutation(values).astype(np.float32)


class Card:
    """The host library as far as sm_speeds calls it."""

    def __init__(self, measured: np.ndarray, name: str = "NVIDIA H200", status: int = host.OK) -> None:
        self.measured, self.name, self.status = measured, name, status
        self.launches = 0

    def fp_cuda_device_info(self, device: int, info) -> int:
        info._obj.name, info._obj.num_sms = self.name.encode(), len(self.measured)
        return host.OK

    def fp_cuda_sm_speeds(self, handle: int, buffer: int, buffer_bytes: int, speeds: int) -> int:
        self.launches += 1
        values = self.measured.astype(np.float32)
        ctypes.memmove(speeds, values.ctypes.data, values.nbytes)
        return self.status

    def fp_last_error(self) -> bytes:
        return b"measuring what SMs read"

    def insert(self, monkeypatch: pytest.MonkeyPatch) -> Card:
        sm_speeds._speeds.cache_clear()
        info = host.KernelInfo(num_sms=len(self.measured))
        empty = torch.empty
        monkeypatch.setattr(host, "load", lambda: self)
        monkeypatch.setattr(jit, "get_kernel", lambda spec, device: SimpleNamespace(handle=1, info=info, spec=spec))
        monkeypatch.setattr(torch, "empty", lambda *shape, dtype, device: empty(*shape, dtype=dtype))
        return self


@pytest.fixture(autouse=True)
def fresh():
    yield
    sm_speeds._speeds.cache_clear()


# ---------------------------------------------------------------- classes


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    ("classes", "noise"),
    [
        (TWO_CLASSES, 0.03),
        ({1.0: 132}, 0.03),
        ({1.0: 100, 1.25: 20, 1.6: 12}, 0.02),
        ({0.8: 6, 1.0: 100, 1.25: 20, 1.6: 6}, 0.02),
    ],
)
def test_classes_are_found_in_the_noise(classes: dict[float, int], noise: float, seed: int) -> None:
    measured = noisy(classes, noise, seed)
    found = sm_speeds.classes(measured)
    assert found is not None
    assert sorted(Counter(found).values()) == sorted(classes.values())
    assert sorted(set(found)) == pytest.approx([41.0 * speed for speed in classes], rel=2 * noise)
    assert np.all(np.abs(measured / found - 1) < 5 * noise)  # each SM in its own


GARBAGE = {
    "nothing was measured": np.zeros(132),
    "one SM is missing": np.concatenate([noisy({1.0: 131}), [0.0]]),
    "negative": np.concatenate([noisy({1.0: 131}), [-1.0]]),
    "not a number": np.concatenate([noisy({1.0: 131}), [np.nan]]),
    "one SM unlike all others": np.concatenate([noisy({1.0: 131}), [60.0]]),
    "scattered": np.linspace(30.0, 60.0, 132),
    "five classes": noisy({1.0: 28, 1.3: 26, 1.7: 26, 2.2: 26, 3.0: 26}, 0.01),
    "each its own": 41.0 * 1.2 ** np.arange(132),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_what_falls_into_no_classes_is_given_up(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sm_speeds.classes(GARBAGE[name]) is None
    card = Card(GARBAGE[name]).insert(monkeypatch)
    assert sm_speeds.speeds(CUDA) is None and card.launches == 1


# ---------------------------------------------------------------- shares of the memory's bandwidth


@pytest.mark.parametrize(
    ("classes", "expected"),
    [
        (TWO_CLASSES, {1.0: 108, 1.125: 24}),  # 38.9 GB/s of 34.5: what is left of the memory
        ({1.0: 108, 1.1: 24}, {1.0: 108, 1.09375: 24}),  # nobody reads more than its way carries
        ({1.0: 70, 1.5: 62}, {1.0: 70, 1.046875: 62}),
        ({1.0: 108, 1.05: 12, 1.5: 12}, {1.0: 108, 1.046875: 12, 1.203125: 12}),
        ({0.9: 8, 1.0: 108, 1.5: 16}, {1.0: 8, 1.109375: 108, 1.375: 16}),
        ({1.0: 90, 1.5: 10}, {1.0: 90, 1.5: 10}),  # too few SMs for the memory
        ({1.0: 140, 1.5: 2}, None),  # the memory bounds all
        ({1.0: 132}, None),
    ],
)
def test_the_fast_share_what_the_slow_leave(classes: dict[float, int], expected: dict[float, int] | None) -> None:
    from_l2 = noisy(classes, noise=0.0)
    found = sm_speeds.share(from_l2, H200)
    assert (found if found is None else Counter(found)) == expected
    if found is not None:
        by_way = np.argsort(from_l2, kind="stable")
        assert np.all(np.diff(found[by_way]) >= 0)


def test_no_card_is_given_more_than_its_memory() -> None:
    ways = 34.5 * noisy(TWO_CLASSES, noise=0.1) / 41.0
    for whole in (1000.0, 4000.0, 4660.0, 5000.0, 9000.0):
        taken = np.minimum(ways, sm_speeds._level(ways, whole)).sum()
        assert taken == pytest.approx(min(whole, ways.sum()))


# ---------------------------------------------------------------- of a card


@pytest.mark.parametrize("seed", range(5))
def test_speeds_are_by_sm_number(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = noisy(TWO_CLASSES, seed=seed)
    card = Card(measured).insert(monkeypatch)
    speeds = sm_speeds.speeds(CUDA)
    assert speeds is not None and list(speeds) == [1.125 if speed > 50 else 1.0 for speed in measured]
    assert Counter(speeds) == {1.0: 108, 1.125: 24}
    assert sm_speeds.speeds(CUDA) is speeds and card.launches == 1  # asked once a process


def test_all_alike_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(noisy({1.0: 132})).insert(monkeypatch)
    assert sm_speeds.speeds(CUDA) is None and card.launches == 1


def test_a_card_that_was_not_measured_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NVIDIA H100 80GB HBM3", "NVIDIA H200 MIG 3g.71gb"):
        card = Card(noisy(TWO_CLASSES), name).insert(monkeypatch)
        assert sm_speeds.speeds(CUDA) is None and not card.launches
    assert sm_speeds.speeds(torch.device("cpu")) is None


def test_where_nothing_can_be_measured_all_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(noisy(TWO_CLASSES), status=host.CUDA_ERROR).insert(monkeypatch)
    assert sm_speeds.speeds(CUDA) is None and card.launches == 1

    def missing(spec, device) -> None:
        raise KernelMissingError(spec.name)

    def full(*shape, dtype, device) -> None:
        raise torch.OutOfMemoryError("no room")

    for owner, name, failing in ((jit, "get_kernel", missing), (torch, "empty", full)):
        with monkeypatch.context() as patch:
            card = Card(noisy(TWO_CLASSES)).insert(patch)
            patch.setattr(owner, name, failing)
            assert sm_speeds.speeds(CUDA) is None and not card.launches


def test_the_kernel_compiles_for_every_architecture(tmp_path) -> None:
    found = [compiler for compiler in (compilers.find_nvcc(), compilers.find_nvrtc()) if compiler]
    if not found:
        pytest.skip("neither nvcc nor NVRTC is here")
    targets = [jit.Target.parse(name) for name in ("sm_80", "sm_90a", "compute_80")]
    for compiler in found:
        some = targets if compiler.name == "nvcc" else targets[:2]
        folder = tmp_path / compiler.name
        results = jit.build_kernels([(sm_speeds.SPEC, target) for target in some], folder, compiler=compiler)
        assert [str(result.error) for result in results if result.error] == []


# ---------------------------------------------------------------- who asks


def prepared(monkeypatch: pytest.MonkeyPatch, speeds, options: Options = DECODE, packed_rows: int = 4):
    info = host.KernelInfo(num_sms=132, ctas_per_sm=1)
    monkeypatch.setattr(jit, "get_kernel", lambda spec, device: SimpleNamespace(handle=1, info=info, spec=spec))
    monkeypatch.setattr(backends, "device_sm", lambda _: 90)
    by_sm = dataclasses.replace(backends.DECODE_SM90, by_sm=True)
    others = [capability for capability in backends.CAPABILITIES if capability is not backends.DECODE_SM90]
    monkeypatch.setattr(backends, "CAPABILITIES", (by_sm, *others))
    monkeypatch.setattr(sm_speeds, "speeds", lambda _: speeds)
    return prepare.Prepared(options, packed_rows, CUDA)


def speeds_of(count: int):
    return (ctypes.c_float * count)(*(1.0 + i % 2 / 8 for i in range(count)))


def test_a_kernel_that_can_is_planned_by_sm(monkeypatch: pytest.MonkeyPatch) -> None:
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
