"""List or clear the kernels that were compiled on this machine, or tell their folder."""

from __future__ import annotations

import argparse

from ..base import env


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=["list", "clear", "path"])


def run(arguments: argparse.Namespace) -> int:
    from ..jit import cache

    if arguments.action == "path":
        print(env.cache_dir())
    elif arguments.action == "clear":
        print(f"removed {cache.clear()} kernels from {env.cache_dir()}")
    else:
        entries = cache.entries()
        for entry in entries:
            m = entry.meta
            print(f"{m['name']}  {m['target']}  {m['size'] / 1024:.0f} KiB  {m['seconds']:.1f} s  {m['compiler']}")
        print(f"{len(entries)} kernels in {env.cache_dir()}")
    return 0
