"""The versions of vLLM with which the backend was tested."""

from __future__ import annotations

from ....base.warn import warn

TESTED = ("0.26.0", "0.32.0", "0.33.0")


def warn_if_untested(version: str) -> None:
    """Warns for a version outside of the table; a local part (0.33.0+cpu) does not count."""
    if version.partition("+")[0] not in TESTED:
        warn(
            f"vllm {version} is not among the versions that its vLLM backend was tested with ({', '.join(TESTED)}). "
            "Compare some outputs with another attention backend first."
        )
