"""Stand-ins for packages that SGLang imports and a test never uses: their wheels are large, or want another torch."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType


class _Names(type):
    """Classes whose every attribute is such a class."""

    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        found = _Names(name, (), {})
        setattr(cls, name, found)
        return found


class _StandIn(ModuleType):
    """A module whose every name is such a class."""

    def __getattr__(self, name: str) -> type:
        found = getattr(_Names(self.__name__, (), {}), name)
        setattr(self, name, found)
        return found


def install(*names: str) -> None:
    """Makes modules, before they are imported by their full names."""
    for name in names:
        module = sys.modules[name] = _StandIn(name)
        module.__spec__ = ModuleSpec(name, None)
        module.__path__ = []
        parent, _, child = name.rpartition(".")
        if parent in sys.modules:
            setattr(sys.modules[parent], child, module)
