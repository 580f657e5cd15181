"""`flashpage selftest` on the CPU: right results, and results that are wrong, slow or missing."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from flashpage import cli
from flashpage.errors import CapabilityError
from flashpage.selftest import cases, main, rates

pytestmark = pytest.mark.usefixtures("quick_kernels")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers, short batches, and rates of which any kernel has enough."""
    layers = (cases.LAYERS[1], cases.LAYERS[-1])
    monkeypatch.setattr(main, "QUICK", layers)
    monkeypatch.setattr(main, "TIMED", {"cpu": (cases.DECODE, cases.PREFILL)})
    monkeypatch.setattr(rates, "read_gbps", lambda *_: 1e-6)
    monkeypatch.setattr(rates, "matmul_tflops", lambda *_: 1e-9)


def selftest(*arguments: str) -> int:
    return cli.main(["selftest", "--quick", "--device", "cpu", *arguments])


def test_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert selftest("--json", str(tmp_path / "out.json")) == 0
    shown, report = capsys.readouterr().out, json.loads((tmp_path / "out.json").read_text())
    assert shown.count("right: error ") == 3 and "all kernels are right, and as fast" in shown
    assert report["verdict"] == "right" and report["device"] == "cpu" and report["machine"][0].startswith("flashpage: ")
    names = [result["name"] for result in report["results"]]
    assert names[:3] == ["Llama 3.2 1B, decode", "Llama 3.2 1B, prefill", "DeepSeek-V3, 16 heads, decode"]
    assert [result["unit"] for result in report["results"]] == ["", "", "", "GB/s", "TFLOP/s"]


@pytest.mark.parametrize("layer", cases.LAYERS[3:6], ids=lambda layer: layer.model)
def test_references_of_other_options(layer: cases.Layer) -> None:
    """Windows, soft caps and sinks, over less columns, for which other tests compile."""
    small = dataclasses.replace(layer, head_dim=64, window_left=min(layer.window_left, 100))
    for batch in (cases.DECODE, cases.PREFILL):
        case = cases.Case(small, batch, torch.device("cpu"))
        assert main._checked(case, case.plan()).is_right


def test_wrong_slow_and_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    plan = cases.Case.plan
    monkeypatch.setattr(main, "QUICK", cases.LAYERS[1:2])
    monkeypatch.setattr(main, "_batches", lambda _: (cases.DECODE,))
    monkeypatch.setattr(main, "TIMED", {"cpu": (cases.DECODE,)})

    def run_scaled(factor: float, number: int) -> Any:
        """A plan whose runs have one of the two results scaled."""

        def planned(case: cases.Case) -> Any:
            run = plan(case)
            return lambda: tuple(x * factor if i == number else x for i, x in enumerate(run()))

        return planned

    for factor, number in ((1.05, 0), (1.05, 1), (float("nan"), 0)):
        monkeypatch.setattr(cases.Case, "plan", run_scaled(factor, number))
        assert selftest() == 1
        shown = capsys.readouterr().out
        assert "some kernels failed or are wrong" in shown and ("WRONG" in shown or "the result has NaN" in shown)
    monkeypatch.setattr(cases.Case, "plan", plan)
    monkeypatch.setattr(rates, "read_gbps", lambda *_: 1e9)
    assert selftest() == 3
    assert "SLOW" in capsys.readouterr().out

    def refuse(case: cases.Case) -> Any:
        raise CapabilityError("no kernel can honour this request")

    monkeypatch.setattr(cases.Case, "plan", refuse)
    assert selftest() == 1
    assert "FAILED: no kernel can honour this request" in capsys.readouterr().out


def test_rates_are_measured() -> None:
    assert 2e-3 <= rates.seconds(lambda: time.sleep(2e-3), torch.device("cpu"), 0.01) < 0.5


def test_a_file_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert selftest("--json", str(tmp_path / "no" / "out.json")) == 1
    assert "No such file" in capsys.readouterr().err
