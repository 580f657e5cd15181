"""The programs of examples/ print what examples/README.md shows, and need few seconds of processor time."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "examples"
_SHOWN = re.compile(r"^## \[(\w+)\.py\].*?^```text\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SHOWN = dict(_SHOWN.findall((FOLDER / "README.md").read_text()))
MOST_SECONDS = 20  # of processor time, a first run's compiler included


def test_each_program_is_shown() -> None:
    assert sorted(SHOWN) == sorted(path.stem for path in FOLDER.glob("*.py"))
    assert len(SHOWN) == 11


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SHOWN))
def test_prints_what_is_shown(name: str, tmp_path: Path) -> None:
    if name.startswith("transformers"):
        pytest.importorskip("transformers")
    if name.startswith("vllm"):
        pytest.importorskip("vllm")
    own = {"PYTHONPATH": str(FOLDER.parent), "FLASHPAGE_PROGRESS": "off", "CUDA_VISIBLE_DEVICES": ""}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, str(FOLDER / f"{name}.py")]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | own, capture_output=True, text=True, timeout=180)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    if name == "plan_picture":  # its numbers follow the kernels' measured costs
        for words in ("CTAs as rows", "kernel decode_sm90", "work: ", "floor on H200"):
            assert words in done.stdout and words in SHOWN[name]
    else:
        assert done.stdout == SHOWN[name]
    assert after.ru_utime - before.ru_utime < MOST_SECONDS
