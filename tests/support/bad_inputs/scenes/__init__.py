"""Scenes of every public function, by name."""

from __future__ import annotations

import functools

from ..scene import Scene
from . import composed, functions, others, wrappers


@functools.cache
def scenes() -> dict[str, Scene]:
    found = [scene for module in (wrappers, composed, functions, others) for scene in module.scenes()]
    return {scene.name: scene for scene in found}
