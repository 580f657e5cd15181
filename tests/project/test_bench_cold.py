"""The program that times first calls, with the host's compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[1] / "bench"


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    import cold

    return cold


@pytest.mark.rare
def test_first_calls_of_decode(tmp_path: Path) -> None:
    """A call from an empty cache compiles, and later processes load what it compiled."""
    environment = os.environ | {"PYTHONPATH": str(BENCH.parent.parent)}
    command = [sys.executable, str(BENCH / "cold.py"), "--small", "--device", "cpu", "--only", "decode"]
    done = subprocess.run([*command, "--json", str(tmp_path / "a")], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(text) for text in (tmp_path / "a").read_text().splitlines()]
    assert [line["case"] for line in lines] == [
        f"decode, {s}" for s in ("from an empty cache", "once built", "a cached kernel")
    ]
    first, built, cached = (line["seconds"]["flashpage"] for line in lines)
    assert first > built > cached > 0
    assert all(line["with_torch"]["flashpage"] > line["seconds"]["flashpage"] for line in lines[:2])
    assert "| decode, a cached kernel | 0." in done.stdout and lines[2]["with_torch"] == {}


def test_processes_of_a_round(cold: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """All processes of a library share an empty folder; figures are medians, and a missed target has parentheses."""
    folders: list[Path] = []

    def in_a_process(library: str, kind: str, state: str, device: str, folder: Path) -> Any:
        if library == cold.PEER:
            raise RuntimeError("it has no kernel for this")
        if state == cold.STATES[0]:
            assert not list(folder.iterdir())
            folders.append(folder)
            (folder / "key").mkdir()
            (folder / "key" / "meta.json").touch()
        assert folder == folders[-1]
        return cold.Spent(call=float(len(folders)), library=0.25, whole=10.0 * len(folders))

    monkeypatch.setattr(cold, "in_a_process", in_a_process)
    found, records = cold.Found(), []
    for _ in range(3):
        found.round([cold.OWN, cold.PEER], "decode", "cuda")
    assert len(set(folders)) == 3 and not any(folder.exists() for folder in folders)

    class Recorder:
        def add(self, section: str, case: str, **figures: Any) -> None:
            records.append((case, figures["seconds"], figures["with_torch"], figures["must"]))

    assert not cold.report("decode", found, True, Recorder())
    assert records == [
        ("decode, from an empty cache", {"flashpage": 2.25}, {"flashpage": 20.0}, 1.5),
        ("decode, once built", {"flashpage": 2.25}, {"flashpage": 20.0}, None),
        ("decode, a cached kernel", {"flashpage": 2.0}, {}, 0.01),
    ]
    out = capsys.readouterr().out
    assert "| decode, from an empty cache | 2.250 |  | 20.000 |  | (1.5) |" in out
    assert "| decode | flashinfer: it has no kernel for this |" in out


def test_kernels_that_are_not_compiled_when_they_should_be(cold: Any) -> None:
    cold.check("from an empty cache", 1)
    cold.check("a cached kernel", 1)
    with pytest.raises(RuntimeError, match="nothing was compiled"):
        cold.check("from an empty cache", 0)
    with pytest.raises(RuntimeError, match="1 kernels were compiled again"):
        cold.check("once built", 1)
