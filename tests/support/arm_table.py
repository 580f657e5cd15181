"""The host library and kernels of 64-bit Arm (NEON) on this machine, in qemu-user: `python tests/support/arm_table.py`.

g++ for aarch64 compiles the library as setup.py does, kernels as the JIT does, and tests/native/small_table.cpp, which
compares them with attention in fp64. Neither Python nor torch is emulated, so that it takes seconds. Without the tools
(apt-get install qemu-user g++-aarch64-linux-gnu) one line says so.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from flashpage.base import paths
from flashpage.base.dtypes import DType
from flashpage.jit import Target, build_kernels, host_target
from flashpage.kernels import devices
from flashpage.kernels.choose import choose_for_card
from flashpage.kernels.options import Options
from flashpage.kernels.spec import KernelSpec
from flashpage.kernels.work import Problem

ROOT = Path(__file__).resolve().parents[2]
CXX, QEMU, OBJDUMP = "aarch64-linux-gnu-g++", "qemu-aarch64", "aarch64-linux-gnu-objdump"
FUSED = re.compile(r"\tfn?m(add|sub|la|ls)\b")
EMULATOR = (QEMU, "-L", "/usr/aarch64-linux-gnu")
SHIPPED = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "csrc", "include", "flashpage")


class Row(NamedTuple):
    """A kernel of the table. `keys` and `values` as tests/native/table_rows.h names them."""

    query: str
    keys: str
    values: str
    columns: tuple[int, int] = (128, 128)
    page_size: int = 16

    def spec(self) -> KernelSpec:
        dtype, stored = DType(self.query), DType.BYTES
        if self.columns[0] != self.columns[1] or self.keys == "deepseek_v4":
            row_format = "plain" if self.keys == "latent" else self.keys
            stored = dtype if row_format == "plain" else DType.FLOAT8_E4M3
            options = Options("latent", 8, 1, *self.columns, self.page_size, dtype, stored, dtype)
            options = dataclasses.replace(options, latent_format=row_format)
        else:
            source = "paged" if self.page_size else "ragged"
            stored = DType(self.keys) if self.keys == self.values else DType.BYTES
            options = Options(source, 8, 2, *self.columns, self.page_size, dtype, stored, dtype)
            if stored is DType.BYTES:
                options = dataclasses.replace(options, k_format=self.keys, v_format=self.values)
        return choose_for_card(Problem(options, 8), devices.CPU).spec


ROWS = (
    Row("float32", "float32", "float32", (64, 64)),
    Row("float16", "float16", "float16", page_size=0),
    Row("bfloat16", "bfloat16", "bfloat16"),
    Row("bfloat16", "float8_e4m3fn", "float8_e4m3fn"),
    Row("float16", "float8_e5m2", "float8_e5m2"),
    Row("bfloat16", "nvfp4", "int4_token"),
    Row("float32", "int8_token", "e4m3_token"),
    Row("bfloat16", "latent", "latent", (576, 512)),
    Row("float16", "scaled", "scaled", (576, 512)),
    Row("bfloat16", "deepseek_v32", "deepseek_v32", (576, 512)),
    Row("bfloat16", "deepseek_v4", "deepseek_v4", (512, 512)),
)


def missing() -> list[str]:
    """The tools that are not here."""
    return [name for name in (CXX, QEMU) if shutil.which(name) is None]


def build_library(folder: Path) -> Path:
    """The host library, built by setup.py in a copy of what it reads."""
    for name in SHIPPED:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, folder / name, ignore=shutil.ignore_patterns("lib", "aot_kernels", "__pycache__")
            )
        else:
            shutil.copy2(ROOT / name, folder)
    environment = os.environ | {"FLASHPAGE_CXX": CXX}
    subprocess.run([sys.executable, "setup.py", "-q", "build_host"], cwd=folder, env=environment, check=True)
    return folder / "flashpage" / "lib" / "libflashpage.so"


def fused_in_plans(tree: Path) -> list[str]:
    """Instructions of the planner's objects that add a product without rounding it, as only Arm's compilers choose
    themselves: with them a plan would differ from a card's."""
    found = []
    for planner in sorted(tree.rglob("plan/*.o")):
        text = subprocess.run([OBJDUMP, "-d", planner], capture_output=True, text=True, check=True).stdout
        found += [f"{planner.name}: {line.strip()}" for line in text.splitlines() if FUSED.search(line)]
    return found


def build_program(folder: Path, compiler: str) -> Path:
    """tests/native/small_table.cpp."""
    flags = ["-std=c++20", "-O2", f"-I{ROOT / 'include'}", f"-I{ROOT / 'csrc'}"]
    source = ROOT / "tests" / "native" / "small_table.cpp"
    subprocess.run([compiler, *flags, str(source), "-o", str(folder / "small_table"), "-ldl"], check=True)
    return folder / "small_table"


def run_rows(folder: Path, library: Path, compiler: str, target: Target, prefix: Sequence[str]) -> int:
    """Compiles each row's kernel and runs it, by `prefix` and the program; returns how many rows failed."""
    program, specs = build_program(folder, compiler), [row.spec() for row in ROWS]
    failed = 0
    results = build_kernels([(spec, target) for spec in specs], folder / "kernels", jobs=1)
    for row, result in zip(ROWS, results, strict=True):
        tile = result.spec.tile
        if result.error or result.entry is None or tile is None:
            raise SystemExit(str(result.error))
        numbers = (*row.columns, row.page_size, tile.tile_q, tile.tile_kv)
        command = [*prefix, program, library, result.entry.path, row.query, row.keys, row.values, *numbers]
        failed += subprocess.run([str(word) for word in command]).returncode != 0
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--here", action="store_true", help="this machine's library and kernels instead, without qemu")
    is_here = parser.parse_args().here
    if missing() and not is_here:
        print(f"skipped: {' and '.join(missing())} not found (apt-get install qemu-user g++-aarch64-linux-gnu)")
        return 0
    with tempfile.TemporaryDirectory(prefix="flashpage-arm-") as name:
        folder = Path(name)
        if is_here:
            failed = run_rows(folder, paths.library(), "g++", host_target(), ())
        else:
            os.environ["FLASHPAGE_CXX"] = CXX
            (folder / "tree").mkdir()
            library = build_library(folder / "tree")
            if fused := fused_in_plans(folder / "tree"):
                raise SystemExit("\n".join(["the planner has fused products:", *fused[:9]]))
            failed = run_rows(folder, library, CXX, Target.parse("neon"), EMULATOR)
    print(f"{'this machine' if is_here else 'aarch64'}: {len(ROWS)} kernels, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
