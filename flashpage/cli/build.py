"""Compile kernels ahead of time: those of a manifest or of --spec into the cache, or else, in a checkout, the AOT list
into the package."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ..base import paths
from ..base.errors import FlashpageError
from . import values

if TYPE_CHECKING:
    from ..jit import Target
    from ..kernels.spec import KernelSpec


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("manifest", nargs="?", type=Path, help="a file that flashpage.jit.write_manifest wrote")
    parser.add_argument("--spec", action="append", default=[], help="one kernel as JSON, copied from an error message")
    parser.add_argument(
        "--target",
        action="append",
        default=[],
        help="sm_80, sm_90a, avx512, avx2 ... (default: the manifest's; for --spec this machine's)",
    )
    parser.add_argument(
        "--output", type=Path, help="folder to fill (default: the cache, or the package for the AOT list)"
    )
    parser.add_argument("--jobs", type=values.count, help="compilers that run at once (default: by cores and memory)")


def run(arguments: argparse.Namespace) -> int:
    if arguments.manifest is None and not arguments.spec:
        return _build_aot_list(arguments)
    from .. import jit

    kernels = _kernels(arguments)
    results = jit.build_kernels(kernels, arguments.output, arguments.jobs)
    for result in results:
        if result.error:
            print(f"{result.spec.name} for {result.target.name}: {result.error}", file=sys.stderr)
    failed = sum(result.error is not None for result in results)
    new = sum(result.is_new for result in results)
    folder = arguments.output or jit.cache.jit_store().folder
    print(f"{new} built, {len(results) - new - failed} there already, {failed} failed: {folder}")
    return 1 if failed else 0


def _kernels(arguments: argparse.Namespace) -> list[tuple[KernelSpec, Target]]:
    """The kernels to build, each with its target; ArgumentError if an argument is wrong."""
    import jinja2

    from .. import jit
    from ..jit.manifest import parse_json, parse_spec
    from ..jit.render import render
    from ..jit.targets import Target
    from ..kernels import find

    try:
        targets = [Target.parse(name) for name in arguments.target]
    except ValueError as error:
        raise values.ArgumentError(f"--target: {error}") from None
    kernels = []
    for text in arguments.spec:
        try:
            spec = parse_spec(parse_json(text))
            render(spec)
        except (ValueError, jinja2.TemplateError, FlashpageError) as error:
            raise values.ArgumentError(f"--spec: not a kernel: {error}") from None
        fitting = [target for target in targets or _targets_here(spec.backend) if target.fits(spec)]
        if not fitting:
            archs = kernel.archs if (kernel := find(spec.kernel)) else ()
            needed = " or ".join(f"sm_{arch}" for arch in archs) or spec.backend
            raise values.ArgumentError(f"--target: the spec needs {needed}, and no given target is of that kind")
        kernels += [(spec, target) for target in fitting]
    if arguments.manifest is not None:
        try:
            listed = jit.read_manifest(arguments.manifest)
        except OSError as error:
            raise values.ArgumentError(f"{arguments.manifest} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise values.ArgumentError(f"{arguments.manifest} is not a manifest: {error}") from None
        kernels += [
            (spec, target)
            for spec, own in listed
            for target in ([t for t in targets if t.fits(spec)] if targets else [own])
        ]
    return kernels


def _targets_here(backend: str) -> list[Target]:
    """The best targets of this machine's CPU or cards."""
    from .. import jit, native

    if backend == "cpu":
        return [jit.host_target()]
    count = native.load().fp_cuda_device_count()
    if not count:
        raise values.ArgumentError("--target: there is no GPU here to build for: name one, like --target sm_90a")
    return list({jit.cuda_target(index) for index in range(count)})


def _build_aot_list(arguments: argparse.Namespace) -> int:
    root = paths.PACKAGE.parent
    if not (root / "aot" / "build.py").is_file():
        raise FlashpageError(
            "the AOT list is in the source tree, not in the installed package: pass a manifest, or use a checkout."
        )
    folder = arguments.output or "the package"
    print(f"building the AOT list into {folder}; `flashpage build --help` has other uses", flush=True)
    command = [sys.executable, "-c", "import sys, aot.build; sys.exit(aot.build.main(program='flashpage build'))"]
    for target in arguments.target:
        command += ["--target", target]
    if arguments.output:
        command += ["--output", str(arguments.output.absolute())]
    if arguments.jobs:
        command += ["--jobs", str(arguments.jobs)]
    return subprocess.run(command, cwd=root).returncode
