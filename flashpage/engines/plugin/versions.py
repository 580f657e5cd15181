"""The versions of engines, and of transformers, with which their plugins were tested.

A new version is a name here. It also needs

- its packages, and the version without an argument, in tests/support/get_vllm.py (`TREES`, `CPU`) or get_sglang.py
  (`PINS` and `main`), and the FlashInfer that it wants in get_flashinfer.py (`VERSIONS`);
- its place in `engines` of .ci/run, if CI runs it, and in `TREES` of tests/engines/test_vllm_engine.py;
- the versions under "Tested" in docs/guides/vllm.md or sglang.md, and in the table of docs/guides/engines.md.

One of transformers needs its place in `other_transformers` of .ci/run, and in docs/guides/transformers.md.
"""

from __future__ import annotations

from ...base.warn import warn

TESTED = {
    "vllm": ("0.26.0", "0.32.0", "0.33.0"),
    "sglang": ("0.5.15.post1", "0.5.23"),
    "transformers": ("5.17", "5.23", "5.24"),  # with any third number, as releases of it mend one alone
}


def warn_if_untested(engine: str, version: str) -> None:
    """Warns for a version outside of the table; a local part (0.33.0+cpu) does not count."""
    number = version.partition("+")[0]
    first_two, _, third = number.rpartition(".")
    is_mended = third.isdigit() and first_two.count(".") == 1 and first_two in TESTED[engine]
    if number not in TESTED[engine] and not is_mended:
        warn(
            f"{engine} {version} is not among the versions that flashpage's attention for it was tested with "
            f"({', '.join(TESTED[engine])}). Compare some outputs with those of another attention first."
        )
