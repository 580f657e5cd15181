"""Compiles the AOT list of two commits (or checkouts) with one nvcc and compares the machine code of every cubin.

    python tests/project/same_machine_code.py OLD NEW [--arch 80 --arch 90a] [--jobs N]

Each side is built by its own code. Names of functions, specs and files do not count. Exit code: 0 if all code is equal,
1 if something differs or has no partner, 2 if a side does not build. Builds are kept: a second call compiles changes.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterable
from io import BytesIO
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT), str(ROOT / "tests" / "support")]
from cubin import Cubin, differences, read_cubin  # noqa: E402

_DIFF_LINES = 60  # lines of one kernel's disassembly


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A cubin with the contents of its meta.json."""

    name: str
    fields: dict[str, Any]  # fields of the spec without its tile's, and the target
    tile: dict[str, Any]
    compiler: str
    path: Path
    cubin: Cubin

    @staticmethod
    def read(meta_file: Path) -> Kernel:
        meta = json.loads(meta_file.read_text())
        path = meta_file.parent / meta["binary"]
        fields = {**meta["spec"], "target": meta["target"]}
        tile = fields.pop("tile", None) or {}
        return Kernel(meta["name"], fields, tile, meta["compiler"], path, read_cubin(path.read_bytes()))


Pair = tuple[Kernel, Kernel]


def pair(old: Iterable[Kernel], new: Iterable[Kernel]) -> tuple[list[Pair], list[Kernel], list[Kernel]]:
    """Pairs of kernels, and the kernels of each side without a partner.

    Only fields that both sides have count. If several partners fit because a field was dropped, equal code decides.
    Then one number of a tile may differ; last come kernels with equal code that share only their target.
    """
    old, new = list(old), list(new)
    fields = _common([k.fields for k in old], [k.fields for k in new])
    tile = _common([k.tile for k in old if k.tile], [k.tile for k in new if k.tile])

    def same_fields(a: Kernel, b: Kernel) -> bool:
        return all(a.fields[name] == b.fields[name] for name in fields)

    def unlike_tiles(a: Kernel, b: Kernel) -> int:
        return sum(a.tile.get(name) != b.tile.get(name) for name in tile)

    rules: list[Callable[[Kernel, Kernel], bool]] = [
        lambda a, b: same_fields(a, b) and unlike_tiles(a, b) == 0 and a.cubin == b.cubin,
        lambda a, b: same_fields(a, b) and a.cubin == b.cubin,
        lambda a, b: same_fields(a, b) and unlike_tiles(a, b) == 0,
        lambda a, b: same_fields(a, b) and unlike_tiles(a, b) == 1,
        lambda a, b: a.fields["target"] == b.fields["target"] and a.cubin == b.cubin,
    ]
    pairs: list[Pair] = []
    for are_partners in rules:
        for kernel in list(old):
            if partner := next((other for other in new if are_partners(kernel, other)), None):
                pairs.append((kernel, partner))
                old.remove(kernel)
                new.remove(partner)
    return pairs, old, new


def _common(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[str]:
    """The fields that every spec of both sides has."""
    return sorted(set.intersection(*map(set, old + new))) if old and new else []


def source_folder(side: str, builds: Path) -> Path:
    """A checkout's folder itself; for a commit, a folder next to its builds into which it is unpacked."""
    if Path(side).is_dir():
        return Path(side).resolve()
    source = builds / "source"
    shutil.rmtree(source, ignore_errors=True)
    archive = subprocess.run(["git", "archive", side], cwd=ROOT, stdout=subprocess.PIPE)
    if archive.returncode:
        print(f"{side!r} is neither a folder nor a commit: give a commit or a checkout's folder", file=sys.stderr)
        sys.exit(2)
    with tarfile.open(fileobj=BytesIO(archive.stdout)) as tar:
        tar.extractall(source, filter="data")
    subprocess.run([sys.executable, "setup.py", "-q", "build_host"], cwd=source, check=True)
    return source


def build(side: str, builds: Path, arches: list[str], jobs: int | None) -> list[Kernel]:
    """The side's cubins; compiles those that `builds` does not hold yet."""
    builds = builds.resolve()
    options = [word for arch in arches for word in ("--arch", arch)] + (["--jobs", str(jobs)] if jobs else [])
    done = subprocess.run(
        [sys.executable, "-m", "aot.build", "--output", builds, *options],
        cwd=source_folder(side, builds),
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        stdout=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        print(f"the kernels of {side} do not build:\n{done.stdout[-2000:]}", file=sys.stderr)
        sys.exit(2)
    found = [Kernel.read(path) for path in sorted(builds.glob("*/meta.json"))]
    return sorted(found, key=lambda kernel: (kernel.fields["target"], kernel.name))


def disassembly_diff(program: str, old: Path, new: Path) -> list[str]:
    """A shortened unified diff of two cubins' instructions."""
    option = "-sass" if "cuobjdump" in Path(program).name else "-c"
    before, after = (
        subprocess.run([program, option, path], stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
        for path in (old, new)
    )
    lines = list(difflib.unified_diff(before, after, "old", "new", n=2, lineterm=""))
    more = [f"... {len(lines) - _DIFF_LINES} more lines"] if len(lines) > _DIFF_LINES else []
    return lines[:_DIFF_LINES] + more


def report(old: list[Kernel], new: list[Kernel], disassembler: str | None, shown: int) -> bool:
    """Prints a line for each kernel that differs, and a summary; returns whether all code is equal."""
    pairs, only_old, only_new = pair(old, new)
    differing = [(a, b, found) for a, b in pairs if (found := differences(a.cubin, b.cubin))]
    for a, b, found in differing:
        print(
            f"{a.fields['target']} {a.name}: code {a.cubin.code_bytes} -> {b.cubin.code_bytes} bytes, "
            f"registers {a.cubin.registers} -> {b.cubin.registers}, launch {a.cubin.launch} -> {b.cubin.launch}: "
            + "; ".join(found)
        )
    for side, kernels in (("old", only_old), ("new", only_new)):
        for kernel in kernels:
            print(f"{kernel.fields['target']} {kernel.name}: only in the {side} list")
    for a, b, _ in differing[:shown] if disassembler else ():
        print(f"\n{a.fields['target']} {a.name}", *disassembly_diff(disassembler or "", a.path, b.path), sep="\n")
    print(
        f"{len(pairs)} kernels compared, {len(differing)} differ, "
        f"{len(only_old)} only in the old list, {len(only_new)} only in the new one"
    )
    return not (differing or only_old or only_new)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", help="a commit or a checkout's folder")
    parser.add_argument("new", help="a commit or a checkout's folder")
    parser.add_argument("--arch", action="append", help="default: 80 and 90a; kept builds for others are removed")
    parser.add_argument("--jobs", type=int, help="number of compilers that run at once; default: by cores and memory")
    folder = ROOT / "build" / "same_machine_code"
    parser.add_argument("--old-builds", type=Path, default=folder / "old", help="default: %(default)s")
    parser.add_argument("--new-builds", type=Path, default=folder / "new", help="default: %(default)s")
    parser.add_argument("--disassembler", help="nvdisasm or cuobjdump; default: what is on PATH")
    parser.add_argument("--show", type=int, default=3, help="kernels whose disassembly is compared; default: 3")
    given = parser.parse_args(arguments)
    if given.old_builds.resolve() == given.new_builds.resolve():
        parser.error("--old-builds and --new-builds are the same folder: a build removes what is not its own")
    arches = given.arch or ["80", "90a"]
    old = build(given.old, given.old_builds, arches, given.jobs)
    new = build(given.new, given.new_builds, arches, given.jobs)
    compilers = sorted({kernel.compiler for kernel in old + new})
    if len(compilers) != 1 or not old:
        print(f"one compiler must have built both sides, found {compilers}: remove the older builds", file=sys.stderr)
        return 2
    disassembler = given.disassembler or shutil.which("nvdisasm") or shutil.which("cuobjdump")
    return 0 if report(old, new, disassembler, given.show) else 1


if __name__ == "__main__":
    sys.exit(main())
