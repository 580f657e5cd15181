"""Show this machine's devices and compilers, torch, environment variables, and the kernels that are compiled."""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import importlib.util
import os
import platform
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from .. import native
from ..base import env, paths
from ..base.errors import FlashpageError
from ..base.text import counted
from ..base.version import VERSION
from . import settings

if TYPE_CHECKING:
    from ..kernels.devices import Device


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None."""


def run(arguments: argparse.Namespace) -> int:
    rows = [*versions(), *devices(), *compilers(), *kernels(), *_environment()]
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")
    settings.check()
    return 0


def versions() -> list[tuple[str, str]]:
    """Versions of flashpage, Python and torch."""
    torch = "not installed"
    if importlib.util.find_spec("torch"):
        torch = importlib.metadata.version("torch")
    return [
        ("flashpage", f"{VERSION} in {paths.PACKAGE}"),
        ("python", f"{platform.python_version()}, torch {torch}"),
    ]


def devices() -> list[tuple[str, str]]:
    """This CPU and the cards."""
    from ..jit import targets
    from ..kernels import devices as cards

    try:
        library = native.load()
        levels = ", ".join(target.name for target in targets.runnable(None))
    except FlashpageError as error:  # shown as a row, as this command is for finding out what is wrong
        return [("cpu", str(error))]
    rows = [("cpu", f"{library.fp_cpu_threads()} threads of {os.cpu_count()} cores; runs kernels for {levels}")]
    for index in range(library.fp_cuda_device_count()):
        info = native.DeviceInfo()
        native.check(library.fp_cuda_device_info(index, ctypes.byref(info)))
        card = cards.from_driver(info)
        what = f"{info.name.decode()}, sm_{info.sm}, {info.num_sms} SMs, {info.memory_bytes / 2**30:.0f} GiB"
        rows.append((f"cuda:{index}", f"{what}, driver for CUDA {info.driver_version / 1000:.1f}"))
        rows.append(("", _rates(card)))
        rows += _served_by(index, info.sm)
        rows += _planned_as(index)
    return rows if len(rows) > 1 else [*rows, ("cuda", "no device")]


def _served_by(index: int, sm: int) -> list[tuple[str, str]]:
    """The targets whose kernels serve a card, what becomes of a kernel that is not built, and what plans see."""
    from ..jit import cache, compilers, loader, targets
    from ..kernels import devices as cards

    try:
        best, is_own = targets.cuda_target(index), cards.has_own_target(sm)
        searched = zip((cache.aot_store(), cache.jit_store()), loader.searched(index), strict=True)
        found = Counter(
            entry.meta["target"]
            for store, wanted in searched
            for entry in store.entries()
            if entry.meta["target"] in {target.name for target in wanted}
        )
        may_compile = compilers.may_compile(best)
    except FlashpageError as error:
        return [("", str(error))]
    served = (f"{found[t.name]} of {_target_name(t.name)}" for t in targets.runnable(index) if found[t.name])
    others = f"are compiled for {_target_name(best.name)}" if may_compile else "are missing, as nothing compiles them"
    rows = [("", f"kernels that are built for it: {', '.join(served) or 'none'}; others {others}")]
    if is_own:
        return rows
    own = targets.Target("cuda", sm).name
    why = "no compiler here knows it" if may_compile else "none are built for it"
    rows.append(("", f"plans use an A100's kernels in this card's shared memory, and not those of {own}: {why}"))
    if may_compile and found[own]:
        rows.append(("", f"FLASHPAGE_JIT=off lets plans use {own}, for which the other kernels are then missing"))
    return rows


def _target_name(name: str) -> str:
    return f"{name} (PTX)" if name.startswith("compute_") else name


def _planned_as(index: int) -> list[tuple[str, str]]:
    """The row of the table of cards that FLASHPAGE_CARD names, if it is set."""
    import torch

    from ..kernels import devices as cards

    if not env.get("FLASHPAGE_CARD"):
        return []
    try:
        return [("", f"planned as {_rates(cards.of(torch.device('cuda', index)))} (FLASHPAGE_CARD)")]
    except FlashpageError as error:
        return [("", str(error))]


def _rates(card: Device) -> str:
    """The rates from which costs are computed, with their source, and the abilities that not every card has."""
    row = "rates estimated (no row of the table of cards names it)" if card.is_estimated else card.name
    return ", ".join((f"{row}: {card.gbps:.0f} GB/s", f"{card.tflops:.0f} TFLOP/s", *card.abilities))


def compilers() -> list[tuple[str, str]]:
    """The compilers of kernels."""
    from ..jit import compilers

    def row(find: Callable[[], compilers.Compiler | None]) -> str:
        try:
            found = find()
            return f"{found.remark} ({found.program[-1]})" if found else "not found"
        except FlashpageError as error:
            return str(error)

    finders = {"g++": compilers.find_cxx, "nvcc": compilers.find_nvcc, "nvrtc": compilers.find_nvrtc}
    return [(name, row(find)) for name, find in finders.items()]


def kernels() -> list[tuple[str, str]]:
    """How many kernels are built, and where they are."""
    from ..jit import cache

    rows: list[tuple[str, str]] = []
    for name, store in (("built ahead", cache.aot_store()), ("cache", cache.jit_store())):
        entries = store.entries()
        targets = sorted({entry.meta["target"] for entry in entries})
        kib = sum(entry.meta["size"] for entry in entries) / 1024
        size = f"{kib / 1024:.1f} MiB" if kib >= 1024 else f"{kib:.0f} KiB"
        for_what = f", {size}, for {', '.join(targets)}," if entries else ""
        rows.append((name, f"{counted(len(entries), 'kernel')}{for_what} in {store.folder}"))
    return rows


def _environment() -> list[tuple[str, str]]:
    refused = settings.refused()
    rows = [
        (name, f"NOT ACCEPTED: {refused[name]}" if name in refused else f"{env.get(name) or '(not set)'}: {meaning}")
        for name, meaning in env.VARIABLES.items()
    ]
    return [*rows, *((name, f"{os.environ[name]}: flashpage has no such variable") for name in settings.unknown())]
