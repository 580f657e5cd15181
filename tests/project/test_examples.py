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


ENGINES = ("vllm", "sglang")


def is_installed(engine: str) -> bool:
    try:  # not by importing it: other tests have stand-ins of that name
        importlib.metadata.distribution(engine)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def test_each_program_is_shown() -> None:
    assert sorted(SHOWN) == sorted(path.stem for path in FOLDER.glob("*.py"))
    assert len(SHOWN) >= 14


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SHOWN))
def test_prints_what_is_shown(name: str, tmp_path: Path) -> None:
    if name.startswith("transformers"):
        pytest.importorskip("transformers")
    if name.startswith(ENGINES) and not is_installed(name.partition("_")[0]):
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


@pytest.mark.parametrize("engine", ENGINES)
def test_without_its_engine_a_program_says_what_to_install(engine: str) -> None:
    if is_installed(engine):
        pytest.skip("the engine is installed")
    done = programs.run([FOLDER / f"{engine}_generate.py"])
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.endswith(
        f" is not installed: pip install -e '.[{engine}]' in the checkout, or pip install {engine}\n"
    )
    assert done.stderr.count("\n") == 1
