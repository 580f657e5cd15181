"""flashpage under FlashMLA's module names, for programs that import its functions for inference."""

from __future__ import annotations

import types

from .. import overlay

_FUSED = "fused_norm_rope_attn_rope_cast"
PACKAGE = overlay.Package(
    "flash_mla",
    "1.0.0",
    __doc__,
    modules={
        "": "flashpage.flash_mla",
        "flash_mla_interface": "flashpage.flash_mla",
        _FUSED: f"{__package__}.{_FUSED}",
    },
    others=frozenset({"flash_attn_varlen_func", "has_legacy"}),  # theirs compute gradients, and know their kernels
    kept=(_FUSED,),
)


def install_flash_mla() -> types.ModuleType:
    """Makes `flash_mla` mean FlashMLA with flashpage's functions, or these alone where none is installed; a second call
    changes nothing. Functions that flashpage does not have, such as those for training, stay an installed FlashMLA's.

    Returns:
        The module `flash_mla`.
    """
    return overlay.install(PACKAGE)


def uninstall_flash_mla() -> None:
    """Removes the modules from sys.modules, so that a later import finds FlashMLA without flashpage."""
    overlay.uninstall(PACKAGE)
