"""Tensors of forms that were seen before: their addresses go into a struct without Python reading each of them."""

from __future__ import annotations

import ctypes

import torch

from . import direct, host


class PointedTensors:
    """The tensors of one kind of call, and the fields of its struct that hold their addresses."""

    def __init__(self, struct: ctypes.Structure, fields: tuple[str, ...], aligned: int) -> None:
        """`aligned`: so many of the first must lie on 16 bytes."""
        offsets = [getattr(type(struct), field).offset for field in fields]
        self._struct = struct  # stays where it is
        self._pointed = host.Pointed(ctypes.addressof(struct), len(fields), aligned)
        self._pointed.offsets[: len(offsets)] = offsets
        self._address = ctypes.addressof(self._pointed)
        self._builtins = direct.builtins()

    def remember(self, *tensors: torch.Tensor | None) -> None:
        """Keeps their shapes, strides, types and device."""
        self._builtins.remember(self._address, *tensors)

    def point(self, *tensors: torch.Tensor | None) -> bool:
        """Writes their addresses; False where they are not as remembered: what is written then is of no use."""
        return self._builtins.point(self._address, *tensors) == host.OK
