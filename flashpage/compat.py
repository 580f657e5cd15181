"""flashpage under other packages' module names: `flashpage.compat.install()` (FlashInfer's), `install_flash_attn()` and
`install_flash_mla()`, before anything imports them."""

from .engines.flash_attn.facade import install_flash_attn, uninstall_flash_attn
from .engines.flash_mla.facade import install_flash_mla, uninstall_flash_mla
from .engines.flashinfer.facade import FLASHINFER_VERSION, SUBMODULES, install, uninstall

__all__ = [
    "FLASHINFER_VERSION",
    "SUBMODULES",
    "install",
    "install_flash_attn",
    "install_flash_mla",
    "uninstall",
    "uninstall_flash_attn",
    "uninstall_flash_mla",
]
