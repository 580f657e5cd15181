"""Which program this process runs."""

from __future__ import annotations

import os
import sys


def is_command() -> bool:
    """Whether it is the command `flashpage`, or `python -m flashpage`. While the package is imported, sys.argv[0] is
    "-m" for every module that -m starts, so the interpreter's own words are read."""
    words = sys.orig_argv
    module = words[words.index("-m") + 1 :][:1] if "-m" in words else []
    return os.path.basename(sys.argv[0]) == "flashpage" or module == ["flashpage"]
