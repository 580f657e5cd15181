"""How a cache holds latent rows (MLA): in bf16, or in e4m3 with one scale for all, with a scale for 128 columns of a
token, or as DeepSeek's rows of 656 bytes."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1] / "support"))
from latent_bytes import E4M3, LARGEST, ROW_BYTES, SCALE_COLUMNS, quantised, to_e4m3, v32_parts, v32_rows

ONE_SCALE = 2.0**-6  # of elements with a standard deviation of one


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
            rows, scales, rest = v32_parts(rows)
        factors = scales.double().repeat_interleave(SCALE_COLUMNS, 1)
        return torch.cat([rows[:, : self.columns].double() * factors, rest.double()], 1)


def token_bytes(row_format: str, columns: int, columns_of_v: int) -> int:
    """Bytes of a token in a cache, its scales included."""
    scales = columns_of_v // SCALE_COLUMNS * torch.float32.itemsize
    return {"": 2 * columns, "tensor": columns, "tokens": columns + scales}.get(row_format, ROW_BYTES)


def stored(rows: Tensor, row_format: str, columns: int) -> Store:
    """The bf16 rows [pages, page_size, columns] in a format; V is the first `columns`."""
    if row_format == "":
        return Store("", rows, columns)
    if row_format == "tensor":
        return Store("tensor", to_e4m3(rows / ONE_SCALE), columns)
    values, rest = rows[..., :columns], rows[..., columns:]
    largest = values.unflatten(-1, (-1, SCALE_COLUMNS)).abs().amax(-1).float()
    scales = (largest / LARGEST).clamp(min=2.0**-30).log2().ceil().exp2()  # powers of two
    numbers = quantised(values, scales)
    if row_format == "tokens":
        parts = [part.view(torch.uint8) for part in (numbers, to_e4m3(rest / ONE_SCALE))]
        return Store("tokens", torch.cat(parts, -1).view(E4M3), columns, scales)
    return Store(row_format, v32_rows(numbers, scales, rest), columns)
