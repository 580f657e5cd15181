"""The daily sample of kernels that CI compiles for every card."""

from __future__ import annotations

import re
from unittest import mock

import pytest

from aot import build as aot_build
from aot import specs
from flashpage import jit
from flashpage.kernels import blocks, devices
from flashpage.kernels.ahead import BF16, E4M3
from flashpage.kernels.spec import KernelSpec


def test_the_sample_follows_from_the_day_and_reaches_every_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = ("sm_80", "sm_90a")
    first, second = (aot_build.sample(aot_build.EVERY_TARGET, day) for day in (1, 2))
    assert aot_build.sample(aot_build.EVERY_TARGET, 1) == first != second
    assert len(first) == len(second) == aot_build.SAMPLE_SIZE
    known = {(spec, target) for spec, target in first if spec in specs.sampled_specs(target)}
    drawn = {(spec, target) for spec, target in first if spec in specs.drawn_specs(target, 1)}
    assert known and drawn and known | drawn == set(first)
    of_kinds = [(spec.kernel, spec.is_latent, target) for spec, target in first]
    assert len(set(of_kinds)) == len(of_kinds)
    toys = [KernelSpec("merge", head_dim_qk=n) for n in range(1, 11)] + [
        KernelSpec("append", head_dim_qk=n) for n in range(1, 11)
    ]
    monkeypatch.setattr(specs, "sampled_specs", lambda _: toys)
    monkeypatch.setattr(specs, "drawn_specs", lambda *_: [])
    monkeypatch.setattr(aot_build, "SAMPLE_SIZE", 3)  # of four kinds
    reached = {kernel for day in range(150) for kernel in aot_build.sample(targets, day)}
    assert reached == {(spec, jit.Target.parse(name)) for spec in toys for name in targets}


def test_the_sample_has_vllms_blocks_over_fp8() -> None:
    """On each target, with the tiles of its cards."""
    for target in map(jit.Target.parse, aot_build.EVERY_TARGET):
        cards = [card for card in devices.CARDS if card.sm == target.arch]
        wanted = {blocks.decode_spec(BF16, E4M3, dim, 4, card) for dim in (64, 120, 128, 256) for card in cards}
        assert wanted <= set(specs.sampled_specs(target)), target.name


def test_a_failed_sample_can_be_repeated(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    compiled: list[list[aot_build.Kernel]] = []
    monkeypatch.setattr(aot_build, "check", lambda kernels, jobs: compiled.append(list(kernels)) or [])
    assert aot_build.main(["--check", "--sample", "--every-target"]) == 0
    day = re.findall(r"--day (\d+) repeats it", capsys.readouterr().out)[0]
    assert aot_build.main(["--check", "--sample", "--every-target", "--day", day]) == 0
    assert compiled[0] == compiled[1] == aot_build.sample(aot_build.EVERY_TARGET, int(day))
    with pytest.raises(SystemExit):
        aot_build.main(["--check", "--day", day])
    assert "--day is for --sample" in capsys.readouterr().err


@pytest.mark.parametrize(("is_known", "status"), [(True, 1), (False, 0)])
def test_spills_of_drawn_plans_are_told(
    is_known: bool, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = mock.Mock(
        target=jit.Target.parse("sm_80"),
        spill_bytes=8,
        registers=168,
        seconds=1.0,
        serial_products=0,
        error=None,
        entry=None,
    )
    monkeypatch.setattr(aot_build, "check", lambda kernels, jobs: [result])
    monkeypatch.setattr(aot_build, "is_known", lambda _: is_known)
    assert aot_build.main(["--check", "--sample", "--every-target", "--day", "1"]) == status
    told = "1 of drawn plans spill" in capsys.readouterr().out
    assert told is not is_known
