"""The torch operators: importing this module registers `torch.ops.flashpage.*`."""

from .wrappers.operators import call, run

__all__ = ["call", "run"]
