"""Run a call again that FLASHPAGE_DUMP=FOLDER has kept: on the card, on the CPU and by a reference in fp64."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="one of the folders in FLASHPAGE_DUMP's folder")


def run(arguments: argparse.Namespace) -> int:
    from ..watch.replay import replay

    print("\n".join(replay(arguments.folder)))
    return 0
