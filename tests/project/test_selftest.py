"""`flashpage selftest` on the CPU: right results, and results that are wrong, slow or missing."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import programs
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
    assert shown.count("right: error ") == 3 and "all kernels are right, and none is slow" in shown
    assert report["verdict"] == "right" and report["device"] == "cpu" and report["machine"][0].startswith("flashpage: ")
    names = [result["name"] for result in report["results"]]
    assert names[:3] == ["Llama 3.2 1B, decode", "Llama 3.2 1B, prefill", "DeepSeek-V3, 16 heads, decode"]
    assert [result["unit"] for result in report["results"]] == ["", "", "", "GB/s", "TFLOP/s"]


def test_what_a_model_has() -> None:
    """fp8 products, rows that fill no lines, pages of one token, and pieces that are merged are checked."""
    assert {layer.page_size for layer in cases.LAYERS} == {1, 16}
    assert {layer.q_dtype.itemsize for layer in cases.LAYERS} == {1, 2} and 96 in {
        layer.head_dim for layer in cases.LAYERS
    }
    assert cases.LONG in main._batches(cases.LAYERS[0]) and main._batches(cases.LAYERS[-1]) == (cases.DECODE,)


OPTIONS = [layer for layer in cases.LAYERS if layer.window_left >= 0 or layer.soft_cap]


@pytest.mark.parametrize("layer", OPTIONS, ids=lambda layer: layer.model)
def test_references_of_other_options(layer: cases.Layer) -> None:
    """Windows, soft caps and sinks, over less columns, for which other tests compile."""
    small = dataclasses.replace(layer, head_dim=64, window_left=min(layer.window_left, 100))
    for batch in (cases.DECODE, cases.PREFILL):
        case = cases.Case(small, batch, torch.device("cpu"))
        assert main._checked(case, torch.empty(cases.WORKSPACE_BYTES["cpu"], dtype=torch.uint8)).is_right


def test_wrong_slow_and_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    plan = cases.Case.plan
    monkeypatch.setattr(main, "QUICK", cases.LAYERS[1:2])
    monkeypatch.setattr(main, "_batches", lambda _: (cases.DECODE,))
    monkeypatch.setattr(main, "TIMED", {"cpu": (cases.DECODE,)})

    def run_scaled(factor: float, number: int) -> Any:
        """A plan whose runs have one of the two results scaled."""

        def planned(case: cases.Case, workspace: torch.Tensor) -> Any:
            run = plan(case, workspace)
            return lambda *tensors: tuple(x * factor if i == number else x for i, x in enumerate(run(*tensors)))

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

    def without_a_head(case: cases.Case, workspace: torch.Tensor) -> Any:
        """A plan whose runs lose a head of the longest request, whose values are small."""
        run = plan(case, workspace)

        def changed(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            out, lse = run(*tensors)
            out[0, 3] = 0.0
            return out, lse

        return changed

    monkeypatch.setattr(cases.Case, "plan", without_a_head)
    assert selftest() == 1
    assert "WRONG" in (shown := capsys.readouterr().out) and "of one row and head 1.0e+00" in shown
    monkeypatch.setattr(cases.Case, "plan", lambda *_: lambda *_: (torch.full((1,), math.inf),) * 2)
    assert selftest() == 1
    assert "the result has NaN or infinite numbers" in capsys.readouterr().out

    def failing(error: Exception) -> Any:
        def fail(*_: Any) -> Any:
            raise error

        return fail

    monkeypatch.setattr(cases.Case, "plan", failing(CapabilityError("no kernel can honour this request")))
    assert selftest() == 1
    assert "FAILED: no kernel can honour this request" in capsys.readouterr().out
    monkeypatch.setattr(cases.Case, "plan", failing(AssertionError("a slot")))
    assert selftest() == 1
    assert "FAILED: AssertionError: a slot" in capsys.readouterr().out


def test_a_card_that_fails_or_is_full(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """After an illegal access nothing works, and the report is written. Little memory is no fault of a kernel."""
    monkeypatch.setattr(main, "QUICK", cases.LAYERS[1:2])

    def fail(*_: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with monkeypatch.context() as patch:
        for owner, name in ((cases.Case, "plan"), (rates, "read_gbps"), (rates, "matmul_tflops")):
            patch.setattr(owner, name, fail)
        assert selftest("--json", str(tmp_path / "out.json")) == 1
    report, shown = json.loads((tmp_path / "out.json").read_text()), capsys.readouterr().out
    assert report["read_gbps"] is None and report["verdict"] == "wrong"
    assert "torch's own rates could not be measured" in shown and shown.count("FAILED: CUDA error") == 2

    plan = cases.Case.plan

    def is_full(case: cases.Case, workspace: torch.Tensor) -> Any:
        if case.batch is cases.PREFILL:
            raise torch.OutOfMemoryError("out of memory")
        return plan(case, workspace)

    monkeypatch.setattr(cases.Case, "plan", is_full)
    assert selftest() == 0
    shown = capsys.readouterr().out
    assert shown.count("not run: too little memory is free") == 2 and "some cases were not run" in shown
    monkeypatch.setattr(main, "_batches", lambda _: (cases.PREFILL,))
    monkeypatch.setattr(main, "TIMED", {"cpu": (cases.PREFILL,)})
    assert selftest() == 1
    assert "nothing could be checked" in capsys.readouterr().out

    def no_memory(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(main.torch, "empty", no_memory)
    assert selftest() == 1
    assert "nothing could be checked" in capsys.readouterr().out


# A compiler that hangs, and ignores SIGTERM.
HANGS = """#!/bin/sh
[ "$1" = --version ] && exec g++ --version
trap '' TERM
echo $$ >> "$COMPILES"
sleep 100
sleep 100
"""


@pytest.mark.parametrize("ends", ["at SIGTERM", "at SIGKILL"])
def test_an_interrupt_while_compilers_run(tmp_path: Path, ends: str) -> None:
    """They end with the program, and the report of an earlier run is gone. None of them counts as failed."""
    compiler, compiles, report = (tmp_path / name for name in ("cxx", "compiles", "report.json"))
    compiler.write_text(HANGS if ends == "at SIGKILL" else HANGS.replace("trap '' TERM", ""))
    compiler.chmod(0o755)
    report.write_text('{"verdict": "right"}')
    own = {"FLASHPAGE_CXX": str(compiler), "COMPILES": str(compiles), "FLASHPAGE_CACHE_DIR": str(tmp_path / "cache")}
    own["FLASHPAGE_PROGRESS"] = "on"
    arguments = ["-m", "flashpage", "selftest", "--quick", "--device", "cpu", "--json", report]
    program = programs.start(arguments, env=os.environ | own)
    end = time.monotonic() + 60
    while not compiles.exists():
        assert time.monotonic() < end
        time.sleep(0.05)
    program.send_signal(signal.SIGINT)
    program.communicate(timeout=30)  # and not 200
    assert program.returncode == 130 and "selftest: interrupted" in program.stderr
    assert json.loads(report.read_text()) == {"verdict": "unfinished"}
    started = [line for line in program.stderr.splitlines() if "compiling" in line]
    assert started and len(set(started)) == len(started)
    assert not (tmp_path / "cache" / ".failed").exists()
    assert not [pid for pid in compiles.read_text().split() if os.path.exists(f"/proc/{pid}")]


@pytest.mark.parametrize("layer", cases.LAYERS, ids=lambda layer: layer.model)
def test_pages_differ(layer: cases.Layer) -> None:
    """So that a kernel which reads other pages than the table's is found."""
    for batch in (cases.DECODE, cases.LONG):
        pages = cases.Case(layer, batch, torch.device("cpu")).tensors()[1].flatten(1).view(torch.uint8)
        assert len({bytes(page[:4096].tolist()) for page in pages}) == len(pages)


def test_rates_are_measured() -> None:
    assert 2e-3 <= rates.seconds(lambda: time.sleep(2e-3), torch.device("cpu"), 0.01) < 0.5


def test_a_file_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert selftest("--json", str(tmp_path / "no" / "out.json")) == 1
    assert "No such file" in capsys.readouterr().err
