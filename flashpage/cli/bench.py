"""Run the benchmarks of tests/bench/ that this machine can run, or the named ones: `flashpage bench NAME --help` lists
the options of one, which follow its name."""

from __future__ import annotations

import argparse
import subprocess
import sys

from ..base import paths
from ..base.errors import FlashpageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--list", action="store_true", help="print the names of the benchmarks and what they need")
    parser.add_argument(
        "names",
        nargs=argparse.REMAINDER,
        metavar="NAME",
        help="benchmarks to run (default: all that can run here), and after a single name that program's options",
    )


def run(arguments: argparse.Namespace) -> int:
    program = paths.PACKAGE.parent / "tests" / "bench" / "run.py"
    if not program.is_file():
        raise FlashpageError("the benchmarks are in the source tree, not in the wheel: run `make bench` in a checkout")
    options = ["--list"] if arguments.list else arguments.names
    return subprocess.run([sys.executable, str(program), *options]).returncode
