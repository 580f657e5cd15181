"""The programs of examples/ print what examples/README.md shows, and need few seconds of processor time."""

from __future__ import annotations

import importlib.metadata
import os
import re
from pathlib import Path

import programs
import pytest

pytestmark = pytest.mark.usefixtures("quick_kernels")

FOLDER = Path(__file__).resolve().parents[2] / "examples"
_SHOWN = re.compile(r"^## \[(\w+)\.py\].*?^```text\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SHOWN = dict(_SHOWN.findall((FOLDER / "README.md").read_text()))
MOST_SECONDS = 20  # of processor time, a first run's compiler included, but not the import of torch


def test_each_program_is_shown() -> None:
    assert sorted(SHOWN) == sorted(path.stem for path in FOLDER.glob("*.py"))
    assert len(SHOWN) >= 14


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SHOWN))
def test_prints_what_is_shown(name: str, tmp_path: Path) -> None:
    if name.startswith("transformers"):
        pytest.importorskip("transformers")
    if name.startswith(("vllm", "sglang")):
        try:  # not by importing it: other tests have stand-ins of that name
            importlib.metadata.distribution(name.partition("_")[0])
        except importlib.metadata.PackageNotFoundError:
            pytest.skip("the engine is not installed")
    own = {"PYTHONPATH": str(FOLDER.parent), "FLASHPAGE_PROGRESS": "off", "CUDA_VISIBLE_DEVICES": ""}
    done = programs.run([FOLDER / f"{name}.py"], cwd=tmp_path, env=os.environ | own, timeout=180)
    assert done.returncode == 0, done.stderr
    if name == "plan_picture":  # its numbers follow the kernels' measured costs
        for words in ("CTAs as rows", "kernel decode_sm90", "work: ", "floor on H200"):
            assert words in done.stdout and words in SHOWN[name]
    else:
        assert done.stdout == SHOWN[name]
    assert done.cpu_seconds < MOST_SECONDS
