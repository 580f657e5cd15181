"""flashpage under FlashInfer's module names, for programs whose imports cannot be changed.

    import flashpage.compat
    flashpage.compat.install()  # before the engine is imported
    import flashinfer.decode  # is flashpage.decode

Where an import can be changed, `import flashpage as flashinfer` does the same. FlashInfer's other parts (sampling,
norms, GEMMs, MoE, communication) are not here: importing them raises ModuleNotFoundError.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
import types
from typing import Any

from ...base.errors import FlashpageError

SUBMODULES = "attention", "cascade", "decode", "mla", "page", "pod", "prefill", "quantization", "sparse", "utils"
FLASHINFER_VERSION = "0.7.2"  # the release whose names and signatures are served

_NAME = "flashinfer"


class _Facade(types.ModuleType):
    """The module `flashinfer` with flashpage's public names. It has no path, so no file is imported a second time."""

    def __getattr__(self, name: str) -> Any:
        import flashpage

        if name in SUBMODULES:
            return importlib.import_module(f"flashpage.{name}")
        if name in flashpage.__all__ and not name.startswith("__"):
            return getattr(flashpage, name)
        raise AttributeError(
            f"module 'flashinfer' has no attribute {name!r}: flashpage stands in its place and has only attention"
        )

    def __dir__(self) -> list[str]:
        import flashpage

        return sorted({*flashpage.__all__, *SUBMODULES, *super().__dir__()})


def install() -> types.ModuleType:
    """Registers `flashinfer` and its submodules in sys.modules; a second call changes nothing.

    Returns:
        The module `flashinfer`.
    """
    present = sys.modules.get(_NAME)
    if isinstance(present, _Facade):
        return present
    if present is not None:
        raise FlashpageError(
            f"flashinfer is already imported from {getattr(present, '__file__', None)}. "
            "Call install() before anything imports it."
        )
    facade = _Facade(_NAME, __doc__)
    spec = importlib.machinery.ModuleSpec(_NAME, None, is_package=True)  # importlib.util.find_spec returns it
    vars(facade).update(__version__=FLASHINFER_VERSION, __path__=[], __spec__=spec)
    modules = {name: importlib.import_module(f"flashpage.{name}") for name in SUBMODULES}
    sys.modules[_NAME] = facade
    for name, module in modules.items():
        sys.modules[f"{_NAME}.{name}"] = module
    return facade


def uninstall() -> None:
    """Removes the names from sys.modules; modules that have imported them keep their references."""
    if isinstance(sys.modules.get(_NAME), _Facade):
        for name in (_NAME, *(f"{_NAME}.{submodule}" for submodule in SUBMODULES)):
            sys.modules.pop(name, None)
