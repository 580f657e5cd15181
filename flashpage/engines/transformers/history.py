"""Which columns of a cache's padded rows were tokens, as cropping and reordering need to know."""

from __future__ import annotations

from typing import NamedTuple

import torch


class _Columns(NamedTuple):
    width: int
    is_token: torch.Tensor | None  # [batch, width] bool; None: all


class History:
    """The columns in order of arrival; neighbouring columns without padding are stored as their number."""

    def __init__(self) -> None:
        self._columns: list[_Columns] = []

    @property
    def length(self) -> int:
        """Columns of a row, padding included."""
        return sum(columns.width for columns in self._columns)

    @property
    def is_padded(self) -> bool:
        return any(columns.is_token is not None for columns in self._columns)

    def append(self, width: int, is_token: torch.Tensor | None) -> None:
        if is_token is None and self._columns and self._columns[-1].is_token is None:
            width += self._columns.pop().width
        self._columns.append(_Columns(width, is_token))

    def crop(self, count: int, batch: int) -> torch.Tensor:
        """Removes the last columns; returns the number of tokens that each row loses, [batch]."""
        removed = torch.zeros(batch, dtype=torch.int64, device="cpu")
        while count:
            width, is_token = self._columns.pop()
            taken = min(count, width)
            removed += taken if is_token is None else is_token[:, width - taken :].sum(1)
            if taken < width:
                self.append(width - taken, None if is_token is None else is_token[:, : width - taken])
            count -= taken
        return removed

    def select(self, requests: torch.Tensor) -> None:
        self._columns = [
            _Columns(width, None if is_token is None else is_token[requests]) for width, is_token in self._columns
        ]
