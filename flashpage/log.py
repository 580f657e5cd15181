"""The library's logger, and kept calls run again. FLASHPAGE_LOG and FLASHPAGE_DUMP choose what is logged and kept."""

from .base.log import LOGGER
from .watch.replay import replay

__all__ = ["LOGGER", "replay"]
