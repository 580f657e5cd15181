"""Whether a card's kernels can be had for its own target. If not, plans see a card of capability 8.0, and kernels of
sm_80 or PTX of compute_80 serve it: `devices.of` asks this."""

from __future__ import annotations

import functools

from ..kernels import devices
from . import cache, compilers
from .cache import Store
from .targets import FIRST_OF_ITS_OWN, PTX, Target


@functools.cache
def has_own_target(sm: int) -> bool:
    """One answer for a process: plans and compiles must agree."""
    own = Target("cuda", sm)
    if sm < FIRST_OF_ITS_OWN or compilers.may_compile(own):
        return True
    if compilers.may_compile(Target("cuda", PTX)):
        return False  # every kernel can be had as PTX, but of its own only those that are built
    stores = (cache.aot_store(), cache.jit_store())  # the package's kernels, else those of a copied cache
    for store in stores:
        if _has_any(store, own.name):
            return True
        if _has_any(store, PTX):
            return False
    # Kernels of sm_80 run on Ada, but few of them fit its shared memory: they count only where there is nothing else.
    # If nothing serves, errors name the card's own target.
    return sm >= 90 or not any(_has_any(store, "sm_80") for store in stores)


def _has_any(store: Store, target: str) -> bool:
    """Stops at the first, as a cache may have a thousand kernels."""
    found = (store.read(folder.name) for folder in store.folders())
    return any(entry is not None and entry.meta["target"] == target for entry in found)


devices.has_own_target = has_own_target
