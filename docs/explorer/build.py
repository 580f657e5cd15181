"""The planner as WebAssembly: `python3 docs/explorer/build.py FILE` compiles docs/explorer/planner.cpp and the host
library's planner, unchanged, with emscripten (`apt-get install emscripten`, 3.1.6 or newer)."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("docs/explorer/planner.cpp", "csrc/plan/planner.cpp", "csrc/errors.cpp")
# A module without emscripten's own JavaScript: explorer.js loads it.
FLAGS = ("-std=c++20", "-O2", "--no-entry", "-sSTANDALONE_WASM", "-sALLOW_MEMORY_GROWTH", "-Iinclude", "-Icsrc")


def compiler() -> str | None:
    return shutil.which("em++")


def build(path: Path) -> None:
    """Writes the module; CalledProcessError if a source does not compile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["em++", *FLAGS, *SOURCES, "-o", str(path.absolute())], cwd=ROOT, check=True)


if __name__ == "__main__":
    build(Path(sys.argv[1]))
