"""Builds the AOT list into flashpage/aot_kernels, which `pip wheel --config-settings=--build-option=--aot=all` ships.

`--check` compiles into a temporary folder. It fails where a kernel does not compile, where registers spill, where ptxas
serialises the wgmmas of a kernel, or where a CTA takes more shared memory than the target's cards have. A sample also
has kernels of drawn plans, of which no list could name all: there it tells what spills, and does not fail.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

from flashpage.base.dtypes import DType
from flashpage.jit import BuildResult, Target, build_kernels, read_manifest
from flashpage.jit.cache import Store, aot_store
from flashpage.kernels.devices import CARDS
from flashpage.kernels.spec import KernelSpec

from . import CPU_TARGETS, specs
from .elf import shared_bytes

# compute_80 is PTX, which the driver compiles for cards without a cubin; aot/specs.py gives it tiles of its own.
WHEEL_TARGETS = ("sm_80", "sm_90a", "compute_80", *CPU_TARGETS.get(os.uname().machine, ()))
CHECK_TARGETS = ("sm_80", "sm_90a")
EVERY_TARGET = tuple(dict.fromkeys(Target("cuda", sm).name for sm in sorted({card.sm for card in CARDS})))
SAMPLE_SIZE = 20  # kernels of --sample

Kernel = tuple[KernelSpec, Target]


def listed(targets: Iterable[str], default_only: bool = False) -> list[Kernel]:
    """The list's specs for these targets, as (spec, target) pairs. ValueError for a CUDA target of no
    card of the table."""
    of_cuda = specs.default_cuda_specs if default_only else specs.cuda_specs
    return [
        (spec, target)
        for target in map(Target.parse, targets)
        for spec in (specs.cpu_specs() if target.backend == "cpu" else of_cuda(target))
    ]


def only_checked(targets: Iterable[str]) -> list[Kernel]:
    """Kernels of these targets that `--check` compiles next to the list."""
    return [(spec, target) for target in map(Target.parse, targets) for spec in specs.only_checked_specs(target)]


def sample(targets: Iterable[str], day: int) -> list[Kernel]:
    """SAMPLE_SIZE kernels of all those that plans may need on these CUDA targets, at most one of each kernel, target
    and kind of rows. They follow from the day alone; over some months each known kernel has its turn, next to others of
    plans that are drawn each day."""
    kernels = [
        (spec, target)
        for target in map(Target.parse, targets)
        for spec in (*specs.sampled_specs(target), *specs.drawn_specs(target, day))
    ]
    drawn: dict[tuple[str, bool, Target], Kernel] = {}
    for spec, target in sorted(kernels, key=lambda kernel: _lot(kernel, day)):
        drawn.setdefault((spec.kernel, spec.is_latent, target), (spec, target))
    return list(drawn.values())[:SAMPLE_SIZE]


def announced_sample(targets: Iterable[str], day: int | None) -> list[Kernel]:
    """The sample of a day, default today, of which it prints the number."""
    day = int(time.time() / 86400) if day is None else day
    print(f"the sample of day {day}; --day {day} repeats it")
    return sample(targets, day)


def is_known(kernel: Kernel) -> bool:
    """Whether plans of the lists need the kernel: no one has looked at those of other plans yet."""
    spec, target = kernel
    return spec in specs.sampled_specs(target)


def _lot(kernel: Kernel, day: int) -> bytes:
    return hashlib.sha256(f"{day} {kernel[0].digest} {kernel[1].name}".encode()).digest()


def without_twins(kernels: Iterable[Kernel]) -> list[Kernel]:
    """Without kernels over fp16 that are in the list over bf16, too, and kernels over ragged KV that are in it over
    pages, but the first twin of each kernel, loader and target. ptxas gives twins the same registers: their
    instructions differ in the type alone, or a ragged kernel lacks the look-up of pages."""
    kernels = list(kernels)
    known, kept = set(kernels), dict[object, Kernel]()
    for spec, target in kernels:
        types = ("q_dtype", "kv_dtype", "out_dtype")
        of_fp16 = {name: DType.BFLOAT16 for name in types if getattr(spec, name) is DType.FLOAT16}
        of_ragged = {"kv_source": "paged"} if spec.kv_source == "ragged" else {}
        key: object = (spec, target)
        for changes in (of_fp16, of_ragged):
            if changes and (dataclasses.replace(spec, **changes), target) in known:
                key = (spec.kernel, spec.loader, target, tuple(changes))
        kept.setdefault(key, (spec, target))
    return list(kept.values())


def checked(targets: Iterable[str]) -> list[Kernel]:
    """The kernels of these targets that `--check` compiles."""
    targets = list(targets)
    return without_twins([*listed(targets), *only_checked(targets)])


def from_manifest(path: Path, targets: Iterable[str] = ()) -> list[Kernel]:
    """The kernels of a manifest (flashpage.jit.write_manifest), for its own targets, or for `targets` instead."""
    used = read_manifest(path)
    if not targets:
        return used
    kernels = [(spec, Target.parse(name)) for spec, _ in used for name in targets]
    return list(dict.fromkeys((spec, target) for spec, target in kernels if target.fits(spec)))


def build_into(folder: Path, kernels: Iterable[Kernel], jobs: int | None = None) -> list[BuildResult]:
    """Makes `folder` hold exactly these kernels: files of other sources or other lists are removed."""
    folder = folder.absolute()
    results = build_kernels(kernels, folder, jobs)
    store = Store(folder)
    built = {result.entry.folder: result for result in results if result.entry}
    for entry in store.folders():
        if entry not in built:
            shutil.rmtree(entry)
    store.forget()
    for entry, result in built.items():
        store.remember(result.spec, result.target, entry.name)
    store.tidy()
    return results


def check(kernels: Iterable[Kernel], jobs: int | None = None) -> list[BuildResult]:
    """Compiles every kernel without the cache, into a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="flashpage-check-") as folder:
        return build_kernels(kernels, Path(folder), jobs)


def shared_of(result: BuildResult) -> int | None:
    """Shared memory of a CTA, as the cubin has it; None: there is no cubin."""
    return shared_bytes(result.entry.image) if result.entry else None


def most_shared(target: Target) -> int:
    """Shared memory that a CTA may have on the target's cards."""
    return max(card.shared_bytes for card in specs.cards_of(target))


def report(results: list[BuildResult]) -> None:
    """Prints one line a kernel: seconds; of a cubin registers, spilled bytes, and shared memory of a CTA."""
    for result in results:
        numbers = f"{result.seconds:6.1f} s"
        if result.registers is not None:
            numbers += f" {result.registers:4d} registers {result.spill_bytes or 0:5d} bytes spilled"
        shared = shared_of(result)
        if shared is not None:
            numbers += f" {shared:6d} shared"
        print(f"{result.target.name:10s} {numbers}  {result.spec.name}{'  FAILED' if result.error else ''}")


class _Parser(argparse.ArgumentParser):
    """Reports a wrong argument in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see `{self.prog} --help`)\n")


def main(arguments: list[str] | None = None, program: str = "python -m aot.build") -> int:
    parser = _Parser(prog=program, description=__doc__.partition("\n")[0])
    parser.add_argument(
        *("--target", "--arch"), action="append", help=f"default: {', '.join(WHEEL_TARGETS)}; repeat for several"
    )
    parser.add_argument("--output", type=Path, default=aot_store().folder, help="default: %(default)s")
    parser.add_argument("--jobs", type=int, help="number of compilers that run at once; default: by cores and memory")
    parser.add_argument(
        "--check",
        action="store_true",
        help="keep nothing; fail on errors, spills, serialised wgmmas and too much shared memory",
    )
    parser.add_argument("--every-target", action="store_true", help="CUDA: a target for each card of the table")
    parser.add_argument(
        "--sample", action="store_true", help=f"CUDA: {SAMPLE_SIZE} kernels of all targets' kernels, drawn by the day"
    )
    parser.add_argument("--day", type=int, help="of --sample, to repeat it; default: days of the Unix clock")
    parser.add_argument(
        "--half", type=int, choices=(0, 1), help="with --check: the kernels at even places of the list, or at odd ones"
    )
    parser.add_argument("--default-only", action="store_true", help="CUDA: only the default specs")
    parser.add_argument(
        "--manifest", type=Path, help="build the kernels of this file (flashpage.jit.write_manifest), not the list"
    )
    given = parser.parse_args(arguments)
    if given.half is not None and not given.check:
        parser.error("--half is for --check: a store has all kernels of its list")
    if given.day is not None and not given.sample:
        parser.error("--day is for --sample: other lists are the same each day")
    try:
        if given.manifest:
            kernels = from_manifest(given.manifest, given.target or ())
        else:
            usual = EVERY_TARGET if given.every_target else CHECK_TARGETS if given.check else WHEEL_TARGETS
            targets = given.target or usual
            if given.check and not (given.sample or given.default_only):
                kernels = checked(targets)
            else:
                kernels = announced_sample(targets, given.day) if given.sample else listed(targets, given.default_only)
            kernels = kernels if given.half is None else kernels[given.half :: 2]
    except (OSError, ValueError) as error:
        parser.error(f"{given.manifest}: not a manifest: {error}" if given.manifest else str(error))
    results = check(kernels, given.jobs) if given.check else build_into(given.output, kernels, given.jobs)
    report(results)
    failed = [result for result in results if result.error]
    spills = [result for result in results if given.check and result.spill_bytes]
    spilled = [result for result in spills if not given.sample or is_known((result.spec, result.target))]
    serial = [result for result in results if given.check and result.serial_products]
    of_cards = [result for result in results if given.check and result.target.name in EVERY_TARGET]
    large = [result for result in of_cards if (shared_of(result) or 0) > most_shared(result.target)]
    for result in serial:
        print(f"{result.spec.name}: ptxas serialises its wgmmas", file=sys.stderr)
    for result in large:
        words = f"a CTA takes {shared_of(result)} bytes of shared memory, and has {most_shared(result.target)}"
        print(f"{result.spec.name}, {result.target.name}: {words}; give it a smaller tile", file=sys.stderr)
    for result in failed:
        print(f"\n{result.error}", file=sys.stderr)
    others = len(spills) - len(spilled)
    drawn = f"; {others} of drawn plans spill: give them smaller tiles" if others else ""
    print(f"{len(results)} kernels, {len(failed)} failed, {len(spilled)} spill registers{drawn}")
    return 1 if failed or spilled or serial or large else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)  # `flashpage build` says that it was interrupted
