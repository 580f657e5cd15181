"""flashpage under other packages' module names: `flashpage.compat.install()` (FlashInfer's) and `install_flash_attn()`,
before anything imports them."""

from .engines.flash_attn.facade import install_flash_attn, uninstall_flash_attn
from .engines.flashinfer.facade import FLASHINFER_VERSION, SUBMODULES, install, uninstall

__all__ = [
    "FLASHINFER_VERSION",
    "SUBMODULES",
    "install",
    "install_flash_attn",
    "uninstall",
    "uninstall_flash_attn",
]
