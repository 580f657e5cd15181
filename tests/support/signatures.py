"""Parameters of functions as text."""

from __future__ import annotations

import inspect


def shown(parameters: list[inspect.Parameter]) -> list[str]:
    """Each parameter as `name` or `name=default`."""
    empty = inspect.Parameter.empty
    return [p.name if p.default is empty else f"{p.name}={p.default!r}" for p in parameters]
