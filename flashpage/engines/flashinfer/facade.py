"""flashpage under FlashInfer's module names, for programs whose imports cannot be changed.

    import flashpage.compat
    flashpage.compat.install()  # before the engine is imported
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper  # flashpage's

If FlashInfer is installed, its modules are imported as they are, and only the names of attention in them are replaced:
sampling, norms, GEMMs, MoE, communication and what flashpage refuses stay FlashInfer's. If it is not, the modules of
`SUBMODULES` are flashpage's own, and importing others raises ModuleNotFoundError.
"""

from __future__ import annotations

import types

from ...base.refused import REASONS
from .. import overlay

SUBMODULES = "attention", "cascade", "decode", "mla", "page", "pod", "prefill", "quantization", "sparse", "utils"
FLASHINFER_VERSION = "0.7.2"  # the release whose names are served, with the parameters of 0.7.4

PACKAGE = overlay.Package(
    "flashinfer",
    FLASHINFER_VERSION,
    __doc__,
    modules={"": "flashpage"} | {name: f"flashpage.{name}" for name in SUBMODULES},
    others=frozenset({"__version__", *REASONS}),
    # The package takes the names of its modules; FlashInfer's own modules use their helpers.
    kept=("", "utils"),
)


def install() -> types.ModuleType:
    """Makes `flashinfer` mean FlashInfer with flashpage's attention, or flashpage alone where none is installed; a
    second call changes nothing.

    Returns:
        The module `flashinfer`.
    """
    return overlay.install(PACKAGE)


def uninstall() -> None:
    """Removes the modules from sys.modules, so that a later import finds FlashInfer without flashpage; what programs
    have imported stays as it is."""
    overlay.uninstall(PACKAGE)
