"""The host library (csrc/) through ctypes: its structs, its functions, and the records of a plan's bytes."""

from .library import *  # noqa: F403
