"""`make venv` shows its progress while packages are installed."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import urllib.parse
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Prints pip's messages, and makes pip's folders.
PIP = """
import sys, time, pathlib
for name in ("torch", "numpy"):
    print("Collecting", name, flush=True)
    time.sleep(0.4)
print("Installing collected packages: numpy, torch", flush=True)
for name in ("numpy", "torch"):
    pathlib.Path(sys.argv[1], name + "-1.0.dist-info").mkdir()
    time.sleep(0.4)
sys.exit(int(sys.argv[2]))
"""


@pytest.fixture
def venv(monkeypatch: pytest.MonkeyPatch):
    spec = importlib.util.spec_from_file_location("venv_of_make", ROOT / ".ci" / "venv.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "_STEP_SECONDS", 0.01)
    monkeypatch.setattr(module, "_LINE_SECONDS", 0.01)
    return module


@pytest.mark.parametrize("is_terminal", [False, True])
def test_an_install_shows_how_far_it_is(
    venv, tmp_path: Path, capsys: pytest.CaptureFixture[str], is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    venv.install([sys.executable, "-c", PIP, str(tmp_path), "0"], tmp_path)
    shown = capsys.readouterr().out
    assert "the last one is torch" in shown and "1 of 2 packages installed" in shown and "installed in " in shown
    assert ("█" in shown) == ("\r" in shown) == is_terminal
    assert shown.count("\n") == 1 or not is_terminal


def test_an_install_that_fails_shows_why(venv, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="Collecting torch(.|\n)*pip failed with exit code 3"):
        venv.install([sys.executable, "-c", PIP, str(tmp_path), "3"], tmp_path)


def test_a_folder_with_a_space(venv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip splits PIP_CONSTRAINT at spaces."""
    monkeypatch.setenv("PIP_CONSTRAINT", "")
    monkeypatch.setenv("PIP_DISABLE_PIP_VERSION_CHECK", "")
    monkeypatch.setattr(venv, "run", lambda *command: (tmp_path / "a b").mkdir(exist_ok=True))
    monkeypatch.setattr(venv, "install", lambda *command: None)
    venv.create(tmp_path / "a b", None)
    url = urllib.parse.urlsplit(os.environ["PIP_CONSTRAINT"])
    assert not re.search(r"\s", url.geturl())
    assert "torch==" in Path(urllib.request.url2pathname(url.path)).read_text()
