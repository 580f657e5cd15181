"""Objects that are neither copied nor pickled."""

from __future__ import annotations

from typing import Any, NoReturn

from .errors import CapabilityError


class Unique:
    """An object with plans in memory that kernels read: a copy would share that memory, or have none."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:  # called by copy.copy, copy.deepcopy and pickle
        name = type(self).__name__
        raise CapabilityError(f"a {name} is neither copied nor pickled, as its plan is its own: make another {name}.")
