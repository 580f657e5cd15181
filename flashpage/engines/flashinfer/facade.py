"""flashpage under FlashInfer's module names, for programs whose imports cannot be changed.

    import flashpage.compat
    flashpage.compat.install()  # before the engine is imported
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper  # flashpage's

If FlashInfer is installed, its modules are imported as they are, and only the names of attention in them are replaced:
sampling, norms, GEMMs, MoE, communication and what flashpage refuses stay FlashInfer's. If it is not, the modules of
`SUBMODULES` are flashpage's own, and importing others raises ModuleNotFoundError.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

from ...base.errors import FlashpageError
from ...base.refused import REASONS

SUBMODULES = "attention", "cascade", "decode", "mla", "page", "pod", "prefill", "quantization", "sparse", "utils"
FLASHINFER_VERSION = "0.7.2"  # the release whose names and signatures are served

_NAME = "flashinfer"
_NOT_ATTENTION = ("utils",)  # FlashInfer's own modules use theirs


def attention_names(submodule: str) -> list[str]:
    """The names of a module of FlashInfer's that flashpage serves itself."""
    if submodule in _NOT_ATTENTION:
        return []
    return [name for name in importlib.import_module(f"flashpage.{submodule}").__all__ if name not in REASONS]


class _Overlay(importlib.abc.MetaPathFinder):
    """Finds FlashInfer's modules where other finders do, and replaces names of attention once they were executed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        head, _, submodule = name.partition(".")
        if head != _NAME or (submodule and submodule not in SUBMODULES):
            return None
        spec = _found_by_others(name, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _OverlayLoader(spec.loader, submodule)
        return spec


class _OverlayLoader(importlib.abc.Loader):
    """A module's loader, after which names of attention are flashpage's."""

    def __init__(self, loader: Any, submodule: str) -> None:
        self._loader, self._submodule = loader, submodule

    def __getattr__(self, name: str) -> Any:
        """Everything else that importlib and its users ask a loader: the source, resources."""
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: types.ModuleType) -> None:
        self._loader.exec_module(module)
        for submodule in (self._submodule,) if self._submodule else SUBMODULES:
            source = importlib.import_module(f"flashpage.{submodule}")
            for name in attention_names(submodule):
                if self._submodule or hasattr(module, name):
                    setattr(module, name, getattr(source, name))


class _Facade(types.ModuleType):
    """The module `flashinfer` where none is installed. It has no path, so no file is imported a second time."""

    def __getattr__(self, name: str) -> Any:
        import flashpage

        if name in SUBMODULES:
            return importlib.import_module(f"flashpage.{name}")
        if name in flashpage.__all__ and not name.startswith("__"):
            return getattr(flashpage, name)
        raise AttributeError(
            f"module 'flashinfer' has no attribute {name!r}: flashpage stands in its place and has only attention, "
            "and no FlashInfer is installed"
        )

    def __dir__(self) -> list[str]:
        import flashpage

        return sorted({*flashpage.__all__, *SUBMODULES, *super().__dir__()})


def install() -> types.ModuleType:
    """Makes `flashinfer` mean FlashInfer with flashpage's attention, or flashpage alone where none is installed; a
    second call changes nothing.

    Returns:
        The module `flashinfer`.
    """
    present = sys.modules.get(_NAME)
    if isinstance(present, _Facade) or _installed() is not None:
        return importlib.import_module(_NAME)
    if present is not None:
        raise FlashpageError(
            f"flashinfer is already imported from {getattr(present, '__file__', None)}. "
            "Call install() before anything imports it."
        )
    if _found_by_others(_NAME, None) is not None:
        sys.meta_path.insert(0, _Overlay())
        try:
            return importlib.import_module(_NAME)
        except BaseException:
            uninstall()
            raise
    facade = _Facade(_NAME, __doc__)
    spec = importlib.machinery.ModuleSpec(_NAME, None, is_package=True)  # importlib.util.find_spec returns it
    vars(facade).update(__version__=FLASHINFER_VERSION, __path__=[], __spec__=spec)
    modules = {name: importlib.import_module(f"flashpage.{name}") for name in SUBMODULES}
    sys.modules[_NAME] = facade
    for name, module in modules.items():
        sys.modules[f"{_NAME}.{name}"] = module
    return facade


def uninstall() -> None:
    """Removes the modules from sys.modules, so that a later import finds FlashInfer without flashpage; modules that have
    imported them keep their references."""
    overlay = _installed()
    if overlay is not None:
        sys.meta_path.remove(overlay)
    if overlay is not None or isinstance(sys.modules.get(_NAME), _Facade):
        for name in [name for name in sys.modules if name.partition(".")[0] == _NAME]:
            del sys.modules[name]


def _installed() -> _Overlay | None:
    return next((finder for finder in sys.meta_path if isinstance(finder, _Overlay)), None)


def _found_by_others(name: str, path: Sequence[str] | None) -> importlib.machinery.ModuleSpec | None:
    """The module's spec by the finders that were there before."""
    for finder in sys.meta_path:
        find = None if isinstance(finder, _Overlay) else getattr(finder, "find_spec", None)
        spec = None if find is None else find(name, path)
        if spec is not None:
            return spec  # type: ignore[no-any-return]
    return None
