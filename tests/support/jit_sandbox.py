"""A toy kernel in a separate folder, so that tests of the JIT and their child processes compile in 0.1 s."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import programs
import pytest

from flashpage.base import paths
from flashpage.jit import loader
from flashpage.kernels.spec import KernelSpec
from flashpage.kernels.tile import Tile
from flashpage.variants.spec import VariantSpec

SUPPORT = Path(__file__).resolve().parent
TEMPLATE = """#include "flashpage/params/params.h"
namespace flashpage::vm {
inline i32 as_mask(i32, bool visible) { return visible; }
inline bool logical_and(bool x, bool y) { return x && y; }
}
{{ sources }}
using namespace flashpage;
extern "C" const int toy_number = {{ spec.head_dim_qk }};
extern "C" void flashpage_cpu_attention(const AttentionParams*, const VariantArgs* args, int, int) {
  [[maybe_unused]] float x = {{ spec.head_dim_qk }};
  if constexpr (Variant::has_logit) x = Variant::logit(*args, x, 0, 0, 0, 0);
}
"""
# A compiler that writes a line to $COMPILES for each start, waits, and calls g++.
COMPILER = """#!/bin/sh
[ "$1" = --version ] && exec g++ --version
echo $$ >> "$COMPILES"
sleep "${COMPILE_SECONDS:-0}"
exec /usr/bin/env g++ "$@"
"""


class Sandbox:
    """Templates, cache, AOT folder and compiler below one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cache, self.aot, self.compiles = folder / "cache", folder / "aot", folder / "compiles"
        self.templates, self.compiler = folder / "templates", folder / "compiler"

    @staticmethod
    def create(folder: Path) -> Sandbox:
        sandbox = Sandbox(folder)
        sandbox.templates.mkdir(parents=True)
        (sandbox.templates / "kernel.cpp.jinja").write_text(TEMPLATE)
        sandbox.compiler.write_text(COMPILER)
        sandbox.compiler.chmod(0o755)
        return sandbox

    @property
    def environment(self) -> dict[str, str]:
        return {
            "FLASHPAGE_CACHE_DIR": str(self.cache),
            "FLASHPAGE_CXX": str(self.compiler),
            "COMPILES": str(self.compiles),
            "PYTHONPATH": os.pathsep.join([str(SUPPORT), str(SUPPORT.parents[1])]),
        }

    def enter(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Redirects this process, with no kernel loaded, until the test ends."""
        for name, value in self.environment.items():
            monkeypatch.setenv(name, value)
        self.redirect(monkeypatch.setattr)
        monkeypatch.setattr(loader, "_kernels", {})

    def redirect(self, setter: Callable[[Any, str, Any], None] = setattr) -> None:
        """Redirects the package to these folders."""
        setter(paths, "templates_dir", lambda: self.templates)
        setter(paths, "aot_dir", lambda: self.aot)
        setter(paths, "fingerprint", lambda: "sandbox")
        setter(paths, "is_settled", lambda: True)

    def num_compiles(self) -> int:
        return len(self.compiles.read_text().split()) if self.compiles.exists() else 0

    def start(self, code: str, **environment: str) -> programs.Program:
        """Starts a process that runs `code` with the package redirected here; `get`, `toy` and `time` are defined."""
        prelude = (
            "import time\nfrom pathlib import Path\nfrom jit_sandbox import Sandbox, toy\n"
            f"Sandbox(Path({str(self.folder)!r})).redirect()\n"
            "from flashpage.jit import get_kernel as get\n"
        )
        return programs.start(["-c", prelude + code], env=os.environ | self.environment | environment)

    def run(self, code: str, **environment: str) -> str:
        """Runs `start` to its end; returns the output."""
        child = self.start(code, **environment)
        out, err = child.communicate(timeout=120)
        assert child.returncode == 0, err
        return out


TILE = Tile(1, 1, 1, 1, 1)


def toy(number: int = 0, logit: str = "") -> KernelSpec:
    """The spec of a toy kernel."""
    return KernelSpec("cpu_attention", head_dim_qk=number, tile=TILE, variant=VariantSpec(logit=logit))
