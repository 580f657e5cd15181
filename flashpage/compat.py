"""flashpage under FlashInfer's module names: `flashpage.compat.install()` before the engine is imported."""

from .engines.flashinfer.facade import FLASHINFER_VERSION, SUBMODULES, install, uninstall

__all__ = ["FLASHINFER_VERSION", "SUBMODULES", "install", "uninstall"]
