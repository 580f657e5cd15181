"""The host library and kernels of 64-bit Arm (NEON) on this machine, in qemu-user: `python tests/support/arm_table.py`.

g++ for aarch64 compiles the library as setup.py does, kernels as the JIT does, and tests/native/small_table.cpp, which
compares them with attention in fp64. Neither Python nor torch is emulated, so that it takes seconds. Without the tools
(apt-get install qemu-user g++-aarch64-linux-gnu) one line says so.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from flashpage.base.dtypes import DType
from flashpage.jit import Target, build_kernels
from flashpage.kernels import cpu_attention, devices
from flashpage.kernels.choose import choose_for_card
from flashpage.kernels.spec import KernelSpec

ROOT = Path(__file__).resolve().parents[2]
CXX, QEMU, SYSTEM = "aarch64-linux-gnu-g++", "qemu-aarch64", "/usr/aarch64-linux-gnu"
ELEMENTS = {DType.FLOAT32: 0, DType.FLOAT16: 1, DType.BFLOAT16: 2}
SHIPPED = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "csrc", "include", "flashpage")
# Each element type, head dim and source of K and V of the kernels in a wheel.
ROWS = ((DType.FLOAT32, 64, "paged"), (DType.FLOAT16, 128, "ragged"), (DType.BFLOAT16, 128, "paged"))


def spec_of(dtype: DType, head_dim: int, source: str) -> KernelSpec:
    """A kernel of the AOT list."""
    found = (choose_for_card(row.problem, devices.CPU, row.variant).spec for row in cpu_attention.KERNEL.ahead)
    return next(s for s in found if (s.q_dtype, s.head_dim_qk, s.kv_source) == (dtype, head_dim, source))


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


def build_program(folder: Path) -> Path:
    """tests/native/small_table.cpp."""
    flags = ["-std=c++20", "-O2", f"-I{ROOT / 'include'}", f"-I{ROOT / 'csrc'}"]
    source = ROOT / "tests" / "native" / "small_table.cpp"
    subprocess.run([CXX, *flags, str(source), "-o", str(folder / "small_table"), "-ldl"], check=True)
    return folder / "small_table"


def main() -> int:
    missing = [name for name in (CXX, QEMU) if shutil.which(name) is None]
    if missing:
        print(f"skipped: {' and '.join(missing)} not found (apt-get install qemu-user g++-aarch64-linux-gnu)")
        return 0
    os.environ["FLASHPAGE_CXX"] = CXX
    failed = 0
    with tempfile.TemporaryDirectory(prefix="flashpage-arm-") as name:
        folder = Path(name)
        (folder / "tree").mkdir()
        library, program = build_library(folder / "tree"), build_program(folder)
        specs = [spec_of(*row) for row in ROWS]
        for result in build_kernels([(spec, Target.parse("neon")) for spec in specs], folder / "kernels", jobs=1):
            if result.error or result.entry is None:
                raise SystemExit(str(result.error))
            spec, tile = result.spec, result.spec.tile
            assert tile is not None
            page_size = 16 if spec.kv_source == "paged" else 0
            numbers = (ELEMENTS[spec.q_dtype], spec.head_dim_qk, page_size, tile.tile_q, tile.tile_kv)
            command = [QEMU, "-L", SYSTEM, program, library, result.entry.path, *numbers]
            failed += subprocess.run([str(word) for word in command]).returncode != 0
    print(f"aarch64: {3 * len(specs)} batches, {failed} kernels failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
