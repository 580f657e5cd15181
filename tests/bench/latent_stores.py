"""How a cache holds latent rows (MLA): in bf16, or in e4m3 with one scale for all, with a scale for 128 columns of a
token, or as DeepSeek's rows of 656 bytes."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max
ONE_SCALE = 2.0**-6  # of elements with a standard deviation of one
SCALE_COLUMNS = 128
ROW_BYTES = 656  # 512 e4m3, four fp32 scales, 64 bf16


@dataclasses.dataclass(frozen=True)
class Store:
    """A cache, and what its elements are multiplied by."""

    row_format: str  # "": bf16 | tensor | tokens | deepseek_v32
    cache: Tensor  # [pages, page_size, columns or bytes]
    columns: int  # that have scales of their own: those of V
    token_scales: Tensor | None = None  # [pages, page_size, columns / 128] fp32

    def run_arguments(self) -> dict[str, Any]:
        """The scales that a run of flashpage or FlashInfer gets."""
        if self.row_format == "tensor":
            return {"ckv_scale": ONE_SCALE, "kpe_scale": ONE_SCALE}
        return {"ckv_scale_arr": self.token_scales, "kpe_scale": ONE_SCALE} if self.row_format == "tokens" else {}

    def exact(self, pages: Tensor) -> Tensor:
        """The rows of these pages in fp64, one after the other, [tokens, columns]."""
        rows = self.cache[pages].flatten(0, 1)
        if self.row_format == "":
            return rows.double()
        if self.row_format == "tensor":
            return rows.double() * ONE_SCALE
        if self.row_format == "tokens":
            assert self.token_scales is not None
            scales, rest = self.token_scales[pages].flatten(0, 1), rows[:, self.columns :].double() * ONE_SCALE
        else:
            rows, scales, rest = rows.split([self.columns, 16, ROW_BYTES - self.columns - 16], 1)
            rows, scales = rows.contiguous().view(E4M3), scales.contiguous().view(torch.float32)
            rest = rest.contiguous().view(torch.bfloat16).double()
        factors = scales.double().repeat_interleave(SCALE_COLUMNS, 1)
        return torch.cat([rows[:, : self.columns].double() * factors, rest], 1)


def stored(rows: Tensor, row_format: str, columns: int) -> Store:
    """The bf16 rows [pages, page_size, columns] in a format; V is the first `columns`."""
    if row_format == "":
        return Store("", rows, columns)
    if row_format == "tensor":
        return Store("tensor", _e4m3(rows / ONE_SCALE), columns)
    blocks, rest = rows[..., :columns].unflatten(-1, (-1, SCALE_COLUMNS)), rows[..., columns:]
    scales = (blocks.abs().amax(-1).float() / LARGEST).clamp(min=2.0**-30).log2().ceil().exp2()  # powers of two
    numbers = _e4m3((blocks / scales.unsqueeze(-1).to(blocks.dtype)).flatten(-2))
    if row_format == "tokens":
        parts = [part.view(torch.uint8) for part in (numbers, _e4m3(rest / ONE_SCALE))]
        return Store("tokens", torch.cat(parts, -1).view(E4M3), columns, scales)
    parts = [numbers.view(torch.uint8), scales.view(torch.uint8), rest.contiguous().view(torch.uint8)]
    return Store(row_format, torch.cat(parts, -1), columns)


def _e4m3(numbers: Tensor) -> Tensor:
    return numbers.clamp(-LARGEST, LARGEST).to(E4M3)
