"""A wheel with kernels of cards, for machines without a compiler: `python -m aot.wheel --output dist`.

flashpage_kernels adds files to the folder of kernels of an installed flashpage of the same version, and has no code of
its own. It fits every machine and Python, because a kernel of a card depends on the card alone.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

from flashpage.base.version import VERSION
from flashpage.jit import Target
from flashpage.jit.targets import PTX

from . import specs
from .build import Kernel, build_into, listed, report

ROOT = Path(__file__).resolve().parent.parent
# A100, L4 and L40S, H100 and H200; PTX for every other card, if no compiler makes kernels of its own.
TARGETS = ("sm_80", "sm_89", "sm_90a", PTX)
NAME, INFO = "flashpage_kernels", f"flashpage_kernels-{VERSION}.dist-info"
INSIDE = "flashpage/aot_kernels"
_DATE = (1980, 1, 1, 0, 0, 0)  # equal files make equal wheels

METADATA = """Metadata-Version: 2.4
Name: flashpage-kernels
Version: {version}
Summary: Compiled kernels of NVIDIA GPUs for flashpage: {targets}
License-Expression: Apache-2.0
Requires-Python: >=3.10
Requires-Dist: flashpage=={version}
Description-Content-Type: text/markdown

Kernels that flashpage {version} finds in place of compiling them, for {targets}. They are used where the options of a
plan are usual ones; other options compile a kernel as before. `flashpage info` counts the kernels that were found.
"""
WHEEL = "Wheel-Version: 1.0\nGenerator: flashpage aot.wheel\nRoot-Is-Purelib: false\nTag: py3-none-any\n"


def kernels_of(targets: Iterable[str], default_only: bool = False) -> list[Kernel]:
    """The kernels of the list, and those of its plans in each class of contexts: a machine without a compiler has
    nothing to put in their place."""
    contexts = [
        (spec, target)
        for target in map(Target.parse, targets)
        for spec in specs.attention_specs(target, default_only, all_contexts=True)
    ]
    return list(dict.fromkeys([*listed(targets, default_only), *contexts]))


def pack(kernels: Path, targets: tuple[str, ...], output: Path) -> Path:
    """Writes the wheel of a folder of kernels; returns its path."""
    files = {
        f"{INSIDE}/{path.relative_to(kernels)}": path.read_bytes() for path in kernels.rglob("*") if path.is_file()
    }
    files[f"{INFO}/METADATA"] = METADATA.format(version=VERSION, targets=", ".join(targets)).encode()
    files[f"{INFO}/WHEEL"] = WHEEL.encode()
    files[f"{INFO}/licenses/LICENSE"] = (ROOT / "LICENSE").read_bytes()
    record = [f"{name},sha256={_digest(data)},{len(data)}" for name, data in sorted(files.items())]
    output.mkdir(parents=True, exist_ok=True)
    path = output / f"{NAME}-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as wheel:
        for name, data in sorted(files.items()):
            wheel.writestr(_entry(name), data)
        wheel.writestr(_entry(f"{INFO}/RECORD"), "\n".join([*record, f"{INFO}/RECORD,,"]) + "\n")
    return path


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")


def _entry(name: str) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name, _DATE)
    entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
    return entry


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m aot.wheel", description=__doc__.partition("\n")[0])
    parser.add_argument("--target", action="append", help=f"default: {', '.join(TARGETS)}; repeat for several")
    parser.add_argument("--default-only", action="store_true", help="only the kernels that most models need")
    parser.add_argument(
        "--kernels", type=Path, default=ROOT / "build" / "kernels", help="where they are built and kept"
    )
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="folder of the wheel")
    parser.add_argument("--jobs", type=int, help="number of compilers that run at once; default: by cores and memory")
    given = parser.parse_args(arguments)
    targets = tuple(given.target or TARGETS)
    results = build_into(given.kernels, kernels_of(targets, given.default_only), given.jobs)
    report(results)
    if failed := [result for result in results if result.error]:
        print(f"{len(failed)} kernels failed: no wheel\n{failed[0].error}", file=sys.stderr)
        return 1
    path = pack(given.kernels, targets, given.output)
    print(f"{path}: {len(results)} kernels, {path.stat().st_size / 1e6:.2f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
