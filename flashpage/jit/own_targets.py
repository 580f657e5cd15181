"""Whether a card's kernels can be had for its own target. If not, plans see a card of capability 8.0, and kernels of
sm_80 or PTX of compute_80 serve it: `devices.of` asks this."""

from __future__ import annotations

from ..kernels import devices
from . import cache, compilers
from .targets import PTX, Target

FIRST_OF_ITS_OWN = 89  # the kernels of older cards are those of an A100


def has_own_target(sm: int) -> bool:
    """Whether kernels are compiled for it here, or else whether some are built, ahead or in the cache; also if nothing
    could serve instead, so that errors name the card's own."""
    own = Target("cuda", sm)
    if sm < FIRST_OF_ITS_OWN or compilers.may_compile(own):
        return True
    built = {entry.meta["target"] for store in (cache.aot_store(), cache.jit_store()) for entry in store.entries()}
    instead = {PTX, "sm_80"} if sm < 90 else {PTX}
    return own.name in built or not (built & instead or compilers.may_compile(Target("cuda", PTX)))


devices.has_own_target = has_own_target
