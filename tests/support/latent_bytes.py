"""Latent rows as fp8 caches hold them: numbers in e4m3, and the bytes of DeepSeek V3.2's rows. Benchmarks use it, too,
so that it needs torch alone."""

from __future__ import annotations

import torch

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max
SCALE_COLUMNS = 128  # that share a scale
COLUMNS, ROW_BYTES = 512, 656  # of a V3.2 row: e4m3, and with four fp32 scales and 64 bf16


def to_e4m3(numbers: torch.Tensor) -> torch.Tensor:
    """The nearest numbers of e4m3; larger ones become the largest."""
    return numbers.clamp(-LARGEST, LARGEST).to(E4M3)


def quantised(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Rows [..., columns] divided by scales [..., blocks], each of equally many columns, in e4m3."""
    blocks = rows.unflatten(-1, (scales.shape[-1], -1))
    return to_e4m3((blocks / scales.unsqueeze(-1).to(rows.dtype)).flatten(-2))


def v32_rows(numbers: torch.Tensor, scales: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """Rows of 656 bytes from e4m3 [..., 512], fp32 [..., 4] and bf16 [..., 64]."""
    return torch.cat([part.contiguous().view(torch.uint8) for part in (numbers, scales, rest)], -1)


def v32_parts(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The numbers, the scales and the rest of rows of 656 bytes."""
    parts = rows.tensor_split([COLUMNS, COLUMNS + COLUMNS // SCALE_COLUMNS * torch.float32.itemsize], -1)
    numbers, scales, rest = (part.contiguous() for part in parts)
    return numbers.view(E4M3), scales.view(torch.float32), rest.view(torch.bfloat16)
