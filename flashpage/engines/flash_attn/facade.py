"""flashpage under flash-attn's module names, for programs that import its two functions for inference."""

from __future__ import annotations

import types

from .. import overlay

PACKAGE = overlay.Package(
    "flash_attn",
    "2.8.3",
    __doc__,
    modules={"": "flashpage.flash_attn", "flash_attn_interface": "flashpage.flash_attn"},
)


def install_flash_attn() -> types.ModuleType:
    """Makes `flash_attn` mean flash-attn with flashpage's flash_attn_varlen_func and flash_attn_with_kvcache, or these
    two alone where none is installed; a second call changes nothing. For inference only: the two refuse gradients.

    Returns:
        The module `flash_attn`.
    """
    return overlay.install(PACKAGE)


def uninstall_flash_attn() -> None:
    """Removes the modules from sys.modules, so that a later import finds flash-attn without flashpage."""
    overlay.uninstall(PACKAGE)
