"""List or clear the kernels that were compiled on this machine, or tell their folder."""

from __future__ import annotations

import argparse

_ACTIONS = {
    "list": "every kernel, its target, size and compile time",
    "clear": "remove all kernels",
    "path": "the folder",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", nargs="?", choices=_ACTIONS, help="none: tell what there is")


def run(arguments: argparse.Namespace) -> int:
    from ..jit import cache

    if arguments.action is None:
        for action, meaning in _ACTIONS.items():
            print(f"flashpage cache {action:<5}  {meaning}")
        return 0
    store = cache.jit_store()
    if arguments.action == "path":
        print(store.folder)
    elif arguments.action == "clear":
        print(f"removed {store.clear()} kernels from {store.folder}")
    else:
        entries = store.entries()
        for entry in entries:
            m = entry.meta
            print(f"{m['name']}  {m['target']}  {m['size'] / 1024:.0f} KiB  {m['seconds']:.1f} s  {m['compiler']}")
        print(f"{len(entries)} kernels in {store.folder}")
    return 0
