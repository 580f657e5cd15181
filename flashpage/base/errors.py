"""Every error that flashpage raises. Messages name the argument, its value and the fix."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping


class FlashpageError(Exception):
    """Base of all errors raised on purpose."""

    def use_names(self, names: Mapping[str, str]) -> None:
        """Puts the caller's names of arguments in place of those of the inner interface (whole words)."""
        words = "|".join(sorted(map(re.escape, names), key=len, reverse=True))
        self.args = (re.sub(rf"(?<![\w.])(?<!'s )({words})(?!\w)", lambda found: names[found[1]], str(self)),)


class PlanError(FlashpageError, ValueError):
    """An argument of `plan` (or of a constructor) is wrong."""


class RunError(FlashpageError, ValueError):
    """An argument of `run`, or of a function that runs at once, is wrong or does not fit the plan."""


class CapabilityError(FlashpageError, NotImplementedError):
    """No kernel supports the request; the message lists the reasons of the device's kernels."""


class VariantError(FlashpageError, ValueError):
    """A user's variant uses something that cannot be traced or compiled; the message shows the user's line."""


class CompileError(FlashpageError, RuntimeError):
    """A compiler failed; for a user's variant the message shows the user's line first."""


class KernelMissingError(FlashpageError, RuntimeError):
    """A kernel is neither in the AOT folder nor in the cache, and must not or cannot be compiled here."""


class DeviceError(FlashpageError, RuntimeError):
    """The CUDA driver refused a call."""


class SettingError(FlashpageError, ValueError):
    """An environment variable has a value that is not accepted."""


@contextlib.contextmanager
def named(names: Mapping[str, str]) -> Iterator[None]:
    """Puts the caller's names into errors that leave the block, or the decorated function."""
    try:
        yield
    except FlashpageError as error:
        error.use_names(names)
        raise
