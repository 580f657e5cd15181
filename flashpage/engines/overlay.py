"""Packages of others whose attention flashpage serves under their own module names.

An installed package is imported as it is, and then the names of attention in its modules are replaced. Its own modules
keep what they have imported from each other, such as the base of a class. Without an installed package, a facade of
flashpage's names stands in its place.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

from ..base.errors import FlashpageError


@dataclasses.dataclass(frozen=True)
class Package:
    """The names of a package that flashpage serves."""

    name: str
    version: str  # of the facade
    doc: str | None
    modules: dict[str, str]  # by submodule, "": the package itself: the module of flashpage that serves it
    others: frozenset[str] = frozenset()  # names that an installed package keeps
    kept: tuple[str, ...] = ()  # submodules that an installed package keeps as a whole

    def served(self, submodule: str) -> dict[str, Any]:
        """The names of a submodule that flashpage serves in an installed package."""
        if submodule in self.kept or submodule not in self.modules:
            return {}
        source = importlib.import_module(self.modules[submodule])
        return {name: getattr(source, name) for name in source.__all__ if name not in self.others}


class Overlay(importlib.abc.MetaPathFinder):
    """Finds a package's modules where other finders do, and replaces names once the package was executed."""

    def __init__(self, package: Package) -> None:
        self.package = package
        self.is_importing = False  # whether the package's own __init__ is being executed

    def replace(self, modules: dict[str, types.ModuleType]) -> None:
        """Replaces the names of executed modules, also where one of them has imported such a name from another."""
        # The package's objects by id, each with flashpage's in its place. A kept object's id is not given to another.
        replaced: dict[int, tuple[Any, Any]] = {}
        for submodule, module in modules.items():
            for name, value in self.package.served(submodule).items():
                original = vars(module).get(name)
                if original is not None:
                    replaced[id(original)] = original, value
                setattr(module, name, value)
        for submodule, module in modules.items():
            if submodule not in self.package.kept:
                found = {name: replaced[id(value)][1] for name, value in vars(module).items() if id(value) in replaced}
                vars(module).update(found)

    def executed(self) -> dict[str, types.ModuleType]:
        """The submodules with names of attention that are imported, by name."""
        name = self.package.name
        found = {submodule: sys.modules.get(f"{name}.{submodule}") for submodule in self.package.modules if submodule}
        return {submodule: module for submodule, module in found.items() if module is not None}

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        head, _, submodule = name.partition(".")
        if head != self.package.name or (submodule and submodule not in self.package.modules):
            return None
        spec = _found_by_others(self.package, name, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self, submodule)
        return spec


class _Loader(importlib.abc.Loader):
    """A module's loader, after which names of attention are flashpage's."""

    def __init__(self, loader: Any, overlay: Overlay, submodule: str) -> None:
        self._loader, self._overlay, self._submodule = loader, overlay, submodule

    def __getattr__(self, name: str) -> Any:
        """Everything else that importlib and its users ask a loader: the source, resources."""
        if name.startswith("_"):  # a copy asks before it has a loader
            raise AttributeError(name)
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        module: types.ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        overlay = self._overlay
        if self._submodule:
            self._loader.exec_module(module)
            if not overlay.is_importing:  # otherwise replaced below, after all of them have imported from each other
                overlay.replace({self._submodule: module})
            return
        overlay.is_importing = True
        try:
            self._loader.exec_module(module)
        finally:
            overlay.is_importing = False
        overlay.replace(overlay.executed())
        # The package's own module gets those names only that it has imported from its submodules.
        for submodule in overlay.package.modules:
            served = overlay.package.served(submodule)
            vars(module).update({name: value for name, value in served.items() if hasattr(module, name)})


class Facade(types.ModuleType):
    """A package that is not installed. It has no path, so no file is imported a second time."""

    def __init__(self, package: Package) -> None:
        super().__init__(package.name, package.doc)
        self._package = package
        # importlib.util.find_spec returns this spec.
        spec = importlib.machinery.ModuleSpec(package.name, None, is_package=True)
        vars(self).update(__version__=package.version, __path__=[], __spec__=spec)

    def __getattr__(self, name: str) -> Any:
        package = self._package
        if name in package.modules:
            return importlib.import_module(package.modules[name])
        own = importlib.import_module(package.modules[""])
        if name in own.__all__ and not name.startswith("__"):
            return getattr(own, name)
        raise AttributeError(
            f"module {package.name!r} has no attribute {name!r}: flashpage stands in its place and has only attention, "
            f"as no {package.name} is installed"
        )

    def __dir__(self) -> list[str]:
        package = self._package
        own = importlib.import_module(package.modules[""])
        return sorted({*own.__all__, *filter(None, package.modules), *super().__dir__()})


def install(package: Package) -> types.ModuleType:
    """Makes the package's name mean itself with flashpage's attention, or flashpage alone where it is not installed; a
    second call changes nothing."""
    present = sys.modules.get(package.name)
    if isinstance(present, Facade) or _installed(package) is not None:
        return importlib.import_module(package.name)
    if present is not None:
        raise FlashpageError(
            f"{package.name} is already imported from {getattr(present, '__file__', None)}. "
            "Call install() before anything imports it."
        )
    if _found_by_others(package, package.name, None) is not None:
        sys.meta_path.insert(0, Overlay(package))
        try:
            return importlib.import_module(package.name)
        except BaseException:
            uninstall(package)
            raise
    modules = {name: importlib.import_module(source) for name, source in package.modules.items() if name}
    facade = sys.modules[package.name] = Facade(package)
    for name, module in modules.items():
        sys.modules[f"{package.name}.{name}"] = module
    return facade


def uninstall(package: Package) -> None:
    """Removes the modules from sys.modules, so that a later import finds an installed package without flashpage."""
    overlay = _installed(package)
    if overlay is not None:
        sys.meta_path.remove(overlay)
    if overlay is not None or isinstance(sys.modules.get(package.name), Facade):
        for name in [name for name in sys.modules if name.partition(".")[0] == package.name]:
            del sys.modules[name]


def _installed(package: Package) -> Overlay | None:
    overlays = (finder for finder in sys.meta_path if isinstance(finder, Overlay))
    return next((overlay for overlay in overlays if overlay.package is package), None)


def _found_by_others(package: Package, name: str, path: Sequence[str] | None) -> importlib.machinery.ModuleSpec | None:
    """The module's spec by the finders that were there before."""
    for finder in sys.meta_path:
        is_own = isinstance(finder, Overlay) and finder.package is package
        find = None if is_own else getattr(finder, "find_spec", None)
        spec: importlib.machinery.ModuleSpec | None = None if find is None else find(name, path)
        if spec is not None:
            return spec
    return None
