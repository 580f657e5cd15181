"""A user's score and mask functions: traced to expressions, rendered as one C++ struct for the CPU and the GPU."""

from .source import render
from .variant import TracedVariant, Variant, alibi_slopes, builtin, compose

__all__ = ["TracedVariant", "Variant", "alibi_slopes", "builtin", "compose", "render"]
