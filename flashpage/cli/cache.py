"""List or remove the kernels that were compiled on this machine, or print their folder."""

from __future__ import annotations

import argparse

from ..base.text import counted

_ACTIONS = {
    "list": "show each kernel with its target, size, compile time and compiler",
    "clear": "remove all kernels",
    "path": "print the folder",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    meanings = "; ".join(f"{action}: {meaning}" for action, meaning in _ACTIONS.items())
    parser.add_argument("action", nargs="?", choices=_ACTIONS, help=meanings)


def run(arguments: argparse.Namespace) -> int:
    from ..jit import cache

    if arguments.action is None:
        for action, meaning in _ACTIONS.items():
            print(f"flashpage cache {action:<5}  {meaning}")
        return 0
    if arguments.action == "clear":
        print(f"removed {counted(cache.clear(), 'kernel')} from {cache.jit_store().folder}")
        return 0
    store = cache.jit_store()
    if arguments.action == "path":
        print(store.folder)
    else:
        entries = store.entries()
        for entry in entries:
            m = entry.meta
            print(f"{m['name']}  {m['target']}  {m['size'] / 1024:.0f} KiB  {m['seconds']:.1f} s  {m['compiler']}")
        print(f"{counted(len(entries), 'kernel')} in {store.folder}")
    return 0
