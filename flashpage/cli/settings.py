"""Environment variables that the command refuses, or does not know."""

from __future__ import annotations

import os

from ..base import env
from ..base.errors import PlanError, SettingError


def refused() -> dict[str, str]:
    """The messages for all variables whose values are not accepted, by their names."""
    found = env.problems()
    if card := env.get("FLASHPAGE_CARD"):
        from ..kernels import devices

        try:
            devices.named(card)
        except PlanError as error:
            found["FLASHPAGE_CARD"] = f"FLASHPAGE_CARD: {error}"
    return found


def check() -> None:
    """SettingError with a line for each variable whose value is not accepted."""
    if messages := refused().values():
        raise SettingError("\n".join(messages))


def unknown() -> list[str]:
    """Variables of this process that look as if flashpage read them."""
    return sorted(name for name in os.environ if name.startswith("FLASHPAGE_") and name not in env.VARIABLES)
