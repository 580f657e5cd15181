"""Bits of masks packed into bytes; each segment starts on a new byte."""

from __future__ import annotations

import torch

from ..base import checks
from ..base.errors import RunError

_BIT_WEIGHTS = {"little": (1, 2, 4, 8, 16, 32, 64, 128), "big": (128, 64, 32, 16, 8, 4, 2, 1)}


def packbits(x: torch.Tensor, bitorder: str = "big") -> torch.Tensor:
    """Packs booleans into uint8, eight in a byte; the last byte is filled with zeros.

    Args:
        x: any shape, flattened; bool or uint8, where not zero counts as one.
        bitorder: "big": the first value is a byte's highest bit; "little": its lowest.

    Returns:
        uint8, [ceil(x.numel() / 8)].
    """
    bits = _flat_bits(x)
    return _pack(torch.nn.functional.pad(bits, (0, -bits.numel() % 8)), bitorder)


def segment_packbits(x: torch.Tensor, indptr: torch.Tensor, bitorder: str = "big") -> tuple[torch.Tensor, torch.Tensor]:
    """Packs segments of booleans; each segment starts on a new byte.

    Args:
        x: [indptr[-1]], bool or uint8.
        indptr: [segments + 1], where each segment begins, on any device (one copy if it is not on the host).
        bitorder: as in `packbits`.

    Returns:
        The packed bytes, uint8, and their indptr, int32, [segments + 1], both on x's device.
    """
    checks.tensor(indptr, "indptr", RunError)
    if indptr.dim() != 1 or indptr.numel() < 1 or indptr.dtype not in (torch.int32, torch.int64):
        raise RunError(
            f"indptr has shape {tuple(indptr.shape)} and dtype {indptr.dtype}: pass integers, [segments + 1]."
        )
    bits, begins = _flat_bits(x), indptr.cpu().long()
    lengths = begins.diff()
    if begins[0] != 0 or bool((lengths < 0).any()) or int(begins[-1]) != bits.numel():
        raise RunError(
            f"indptr begins at {int(begins[0])} and ends at {int(begins[-1])}, and x has {bits.numel()} values: "
            "start at 0, never decrease, and end at the number of values."
        )
    packed, byte_indptr = pack_segments(bits, lengths, bitorder)
    return packed, byte_indptr.to(device=x.device, dtype=torch.int32)


def pack_segments(bits: torch.Tensor, lengths: torch.Tensor, bitorder: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes on bits' device, and their indptr (int64) on the host; `lengths`: bits in each segment, int64 on the
    host."""
    zero = torch.zeros(1, dtype=torch.int64, device="cpu")
    byte_indptr = torch.cat([zero, ((lengths + 7) // 8).cumsum(0)])
    shifts = byte_indptr[:-1] * 8 - (lengths.cumsum(0) - lengths)  # how far the bits of a segment move
    if not bool(shifts.any()):
        spread = torch.nn.functional.pad(bits, (0, int(byte_indptr[-1]) * 8 - bits.numel()))
    else:
        spread = torch.zeros(int(byte_indptr[-1]) * 8, dtype=torch.uint8, device=bits.device)
        moved = torch.repeat_interleave(shifts.to(bits.device), lengths.to(bits.device), output_size=bits.numel())
        spread[torch.arange(bits.numel(), device=bits.device) + moved] = bits
    return _pack(spread, bitorder), byte_indptr


def _flat_bits(x: torch.Tensor) -> torch.Tensor:
    """The values as 0 or 1, uint8."""
    checks.tensor(x, "x", RunError)
    if x.dtype not in (torch.bool, torch.uint8):
        raise RunError(f"x has dtype {x.dtype}: pass bool or uint8.")
    return x.reshape(-1).ne(0).to(torch.uint8)


def _pack(bits: torch.Tensor, bitorder: str) -> torch.Tensor:
    if bitorder.__class__ is not str or bitorder not in _BIT_WEIGHTS:
        raise RunError(f"bitorder={checks.shown(bitorder)} is unknown: pass 'big' or 'little'.")
    weights = torch.tensor(_BIT_WEIGHTS[bitorder], dtype=torch.uint8, device=bits.device)
    return (bits.view(-1, 8) * weights).sum(1, dtype=torch.uint8)
