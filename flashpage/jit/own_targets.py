"""Whether a card's kernels can be had for its own target. If not, PTX of compute_80 serves the card, and plans see a
card of that capability: `devices.of` asks this."""

from __future__ import annotations

import functools
import re
import subprocess

from ..base.errors import CompileError
from ..kernels import devices
from . import cache, compilers
from .targets import Target

FIRST_CHECKED = 100  # every toolkit that compiles C++20 for cards knows the older ones


def has_own_target(sm: int) -> bool:
    """Whether the compiler found here knows the target or, without a compiler, kernels are built ahead for it."""
    return sm < FIRST_CHECKED or _is_known(sm)


@functools.cache
def _is_known(sm: int) -> bool:
    try:
        found = compilers.find_nvcc() or compilers.find_nvrtc()
    except CompileError:  # of a wrong variable; compiles report it
        return True
    if found is None:
        target = Target("cuda", sm).name
        return any(entry.meta["target"] == target for entry in cache.aot_store().entries())
    known = known_targets(found)
    return not known or sm in known


def known_targets(compiler: compilers.Compiler) -> set[int]:
    """The compute capabilities, times ten, for which it makes cubins; empty if it does not say."""
    option = "--list-gpu-code" if compiler.name == "nvcc" else "--list"
    done = subprocess.run([*compiler.program, option], capture_output=True, text=True, check=False)
    return {int(sm) for sm in re.findall(r"\bsm_(\d+)", done.stdout)}


devices.has_own_target = has_own_target
