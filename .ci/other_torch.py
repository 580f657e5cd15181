"""A short smoke with the oldest torch that flashpage supports on even days, and with the newest one on odd days, in an
environment of its own: `python3 .ci/other_torch.py [oldest|newest|VERSION]`.

Only builds for the CPU are used, which have "+cpu" in their versions: others come with gigabytes of CUDA libraries. If
pip knows none (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS), one line says so.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from attempts import ROOT, Attempts, found

# Calls of each kind (with kernels that the test suite has compiled), and builtins that read tensors by torch's DLPack
# functions, which the oldest torch lacks.
TESTS = ("tests/api/test_api.py", "tests/api/test_api_direct.py", "tests/host/test_host_layout.py")


def cpu_builds() -> list[str]:
    """Versions of torch for the CPU that pip finds, the newest first."""
    command = [sys.executable, "-m", "pip", "index", "versions", "torch"]
    done = subprocess.run(command, capture_output=True, text=True)
    listed = re.search(r"^Available versions: (.*)", done.stdout, re.MULTILINE)
    return [version for version in listed[1].split(", ") if version.endswith("+cpu")] if listed else []


def chosen(which: str, versions: list[str]) -> str | None:
    """The version to try, or None."""
    if which == "newest":
        return versions[0] if versions else None
    wanted = found(r'^    "torch>=(\d+\.\d+)', "pyproject.toml") if which == "oldest" else which
    return next(
        (version for version in reversed(versions) if f"{version}.".startswith((f"{wanted}.", f"{wanted}+"))), None
    )


def main() -> int:
    which = sys.argv[1] if len(sys.argv) > 1 else ("oldest", "newest")[int(time.time() // 86400) % 2]
    version = chosen(which, cpu_builds())
    if version is None:
        print(f"skipped: pip finds no build for the CPU of the {which} torch")
        return 0
    if which == "newest" and version == f"{found(r'^torch==(.*)', 'constraints.txt')}+cpu":
        print(f"skipped: the newest build of torch for the CPU is the pinned one, {version}")
        return 0
    attempts, torch = Attempts(), f"torch {version}"
    environment = {name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"}
    with tempfile.TemporaryDirectory(prefix="flashpage-torch-") as name:
        folder = Path(name)
        python = attempts.environment(torch, folder / "venv")
        packages = (f"torch=={version}", "numpy>=1.26", "jinja2", "ninja", "pytest")
        attempts.install(torch, python, "--no-compile", *packages, env=environment)
        environment["PYTHONPATH"] = str(ROOT)
        attempts.readme_and_demo(torch, [str(python)], environment, folder)
        attempts.step(
            f"{torch}: tests", python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS, env=environment
        )
    return attempts.show()


if __name__ == "__main__":
    sys.exit(main())
