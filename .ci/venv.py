"""Creates or updates the virtual environment of `make` and CI: `python3 .ci/venv.py FOLDER [--own-torch]`.
`--docs`: the environment of `make docs`, without torch and flashpage.

If the calling python3 has torch 2.9 or newer, the environment uses that installation; otherwise the pinned torch is
installed. A second call waits for the first. If nothing has changed, a call takes a fraction of a second.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
_STEP_SECONDS, _LINE_SECONDS = 0.25, 10.0  # between two looks at pip; between two lines where there is no terminal
_CELLS, _CLEAR = 30, "\r\033[K"


def installed_torch() -> Path | None:
    """The site-packages folder of this Python's torch; None if there is no torch, or an older one than 2.9."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    version = importlib.metadata.version("torch")
    numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:2])
    if numbers < (2, 9):
        print(f"torch {version} is installed but flashpage needs 2.9 or newer: installing the pinned one", flush=True)
        return None
    print(f"using the installed torch {version}", flush=True)
    return Path(spec.origin).parent.parent


def run(*command: object) -> None:
    done = subprocess.run([str(part) for part in command], cwd=ROOT)
    if done.returncode:
        sys.exit(f"venv.py: `{' '.join(map(str, command[1:]))}` failed with exit code {done.returncode}")


def create(folder: Path, torch_home: Path | None) -> None:
    """A fresh environment with the pinned packages and flashpage itself, editable."""
    print(f"making the virtual environment {folder.name} for {sys.executable} ...", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    run(sys.executable, "-m", "venv", folder)
    python = folder / "bin" / "python"
    pins = CONSTRAINTS.read_text()
    if torch_home is not None:
        site = sysconfig.get_path("purelib", "venv", vars={"base": str(folder)})
        Path(site, "installed_torch.pth").write_text(f"{torch_home}\n")
        pins = re.sub(r"(?m)^torch==.*\n", "", pins)
    constraints = folder / "constraints.txt"
    constraints.write_text(pins)
    # Set in the environment, so that builds that pip starts obey it too. A URL has no spaces, at which pip splits it.
    os.environ["PIP_CONSTRAINT"] = constraints.as_uri()
    os.environ["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    run(python, "-m", "pip", "install", "-qq", "setuptools", "wheel")
    print("compiling the host library with g++ (some 30 s) ...", flush=True)
    run(python, "setup.py", "-q", "build_host")  # first, as without g++ the downloads would be wasted
    size = "" if torch_home else " (torch among them: this can take minutes)"
    print(f"installing the pinned packages into {folder.name}{size}", flush=True)
    site = Path(sysconfig.get_path("purelib", "venv", vars={"base": str(folder)}))
    # Without bytecode: that of all modules takes most of a minute, and imports write that of the modules they read.
    install([str(python), "-m", "pip", "install", "--no-compile", "--no-build-isolation", "-e", ".[dev]"], site)


def install(command: list[str], site: Path) -> None:
    """Runs pip and shows its progress: packages found, then packages in `site`. If it fails, shows its output."""
    start, lines = time.monotonic(), []
    before, shown = _installed(site), 0.0
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        assert pip.stdout is not None
        reader = threading.Thread(target=lines.extend, args=(pip.stdout,), daemon=True)
        reader.start()
        while reader.is_alive():
            reader.join(_STEP_SECONDS)
            seconds = time.monotonic() - start
            if sys.stdout.isatty() or seconds - shown >= _LINE_SECONDS:
                _draw(list(lines), len(_installed(site) - before), seconds)
                shown = seconds
    if pip.returncode:
        sys.exit(f"{''.join(lines[-30:])}venv.py: pip failed with exit code {pip.returncode}")
    print(f"{_CLEAR if sys.stdout.isatty() else ''}installed in {time.monotonic() - start:.0f} s", flush=True)


def _installed(site: Path) -> set[str]:
    return {path.name for path in site.glob("*.dist-info")}


def _draw(lines: list[str], installed: int, seconds: float) -> None:
    """Draws a bar in place on a terminal, or prints a line. The total is known once pip has found all packages."""
    found = [line.split()[1] for line in lines if line.startswith("Collecting ")]
    total = next((line.count(",") + 1 for line in lines if line.startswith("Installing collected packages")), 0)
    if total:
        text = f"{min(installed, total)} of {total} packages installed"
    else:
        text = f"{len(found)} packages found, the last one is {found[-1]}" if found else "reading the package index"
    if not sys.stdout.isatty():
        print(f"  {seconds:.0f} s: {text}", flush=True)
        return
    filled = _CELLS * min(installed, total) // total if total else 0
    bar = "█" * filled + "░" * (_CELLS - filled)
    print(f"{_CLEAR}{bar} {seconds:.0f} s: {text[:60]}", end="", flush=True)


def create_for_docs(folder: Path) -> None:
    """A fresh environment with what docs/requirements.txt names."""
    shutil.rmtree(folder, ignore_errors=True)
    run(sys.executable, "-m", "venv", folder)
    pip = (folder / "bin" / "python", "-m", "pip", "install", "-qq", "--no-compile", "--disable-pip-version-check")
    print(f"installing the pinned packages of docs/requirements.txt into {folder.name} ...", flush=True)
    run(*pip, "-c", CONSTRAINTS, "-r", ROOT / "docs" / "requirements.txt")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--own-torch", action="store_true", help="install the pinned torch even where there is one")
    parser.add_argument("--docs", action="store_true", help="the packages of docs/requirements.txt, and nothing else")
    arguments = parser.parse_args()
    if sys.version_info < (3, 10):  # noqa: UP036 - any python3 may run this
        sys.exit(f"flashpage needs Python 3.10 or newer; {sys.executable} is {sys.version.split()[0]}: set PYTHON=")
    folder = arguments.folder.absolute()
    torch_home = None if arguments.own_torch or arguments.docs else installed_torch()
    identity = f"{sys.executable} {sys.version} {torch_home}".encode()
    identity += CONSTRAINTS.read_bytes() + (ROOT / "pyproject.toml").read_bytes()
    if arguments.docs:
        identity += (ROOT / "docs" / "requirements.txt").read_bytes()
    key = hashlib.sha256(identity).hexdigest()
    stamp = folder / "made-from"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_name(folder.name + ".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stamp.is_file() or stamp.read_text() != key:
            create_for_docs(folder) if arguments.docs else create(folder, torch_home)
            stamp.write_text(key)
        if not arguments.docs:
            run(folder / "bin" / "python", "setup.py", "-q", "build_host")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)  # without the stamp the next call starts again from nothing
