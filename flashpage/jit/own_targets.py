"""Whether a card's kernels can be had for its own target. If not, plans see a card of capability 8.0, and kernels of
sm_80 or PTX of compute_80 serve it: `devices.of` asks this."""

from __future__ import annotations

import functools

from ..kernels import devices
from . import cache, compilers
from .cache import Store
from .targets import PTX, Target

FIRST_OF_ITS_OWN = 89  # before it no kernel and no rule of a kernel differs from those of 8.0


@functools.cache
def has_own_target(sm: int) -> bool:
    """One answer for a process: plans and compiles must agree."""
    own = Target("cuda", sm)
    if sm < FIRST_OF_ITS_OWN or compilers.may_compile(own):
        return True
    if compilers.may_compile(Target("cuda", PTX)):
        return False  # every kernel can be had as PTX, but of its own only those that a cache happens to have
    instead = {PTX, "sm_80"} if sm < 90 else {PTX}
    for store in (cache.aot_store(), cache.jit_store()):  # the package's kernels, else those of a copied cache
        if _has_any(store, {own.name}):
            return True
        if _has_any(store, instead):
            return False
    return True  # nothing serves, and errors name the card's own target


def _has_any(store: Store, targets: set[str]) -> bool:
    """Stops at the first, as a cache may have a thousand kernels."""
    found = (store.read(folder.name) for folder in store.folders())
    return any(entry is not None and entry.meta["target"] in targets for entry in found)


devices.has_own_target = has_own_target
