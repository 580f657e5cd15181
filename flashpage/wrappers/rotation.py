"""Rows times a Hadamard matrix, which spreads a channel's outliers over all of them. Scores do not change if rows of q
and of K are both rotated."""

from __future__ import annotations

import functools

import torch

from ..kernels.options import Options


def rotated_queries(q: torch.Tensor, options: Options) -> torch.Tensor:
    """q, [rows, heads, head_dim], as rows of K in a rotated format need it, but for Options.rotation_scale: the matrix
    has powers of two, and so is exact in 16 bits."""
    if q.dim() != 3 or q.shape[2] != options.head_dim_qk or q.dtype != options.q_dtype.torch:
        return q  # which is refused next
    return q @ _matrix(q.shape[2], q.dtype, q.device)


@functools.lru_cache(maxsize=32)
def _matrix(columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Of +-2^-n, where 4^n is `columns` or half of them."""
    found = torch.ones(1, 1, device="cpu")
    while len(found) < columns:
        found = torch.cat([torch.cat([found, found], 1), torch.cat([found, -found], 1)])
    return (found * 2.0 ** -((columns.bit_length() - 1) // 2)).to(device, dtype)
