"""New keys and values of flash_attn_with_kvcache: rotated, and written after the tokens that the cache has."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...base import checks
from ...base.errors import RunError, named
from ...wrappers.append import append_paged_kv_cache

_NAMES = {"append_key": "k", "append_value": "v", "paged_kv_cache": "k_cache and v_cache", "positions": "cache_seqlens"}
_NAMES |= {"paged_kv_cache[0]": "k_cache", "paged_kv_cache[1]": "v_cache", "kv_indices": "block_table"}


class Rotation(NamedTuple):
    """Tables of a rotary embedding, [positions, rotary_dim / 2], and how dimensions are paired."""

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool

    @staticmethod
    def of(cos: torch.Tensor | None, sin: torch.Tensor | None, interleaved: bool) -> Rotation | None:
        if cos is None and sin is None:
            return None
        if cos is None or sin is None:
            raise RunError("rotary_cos and rotary_sin belong together: pass both of them, or none.")
        for name, tensor in (("rotary_cos", cos), ("rotary_sin", sin)):
            if checks.tensor(tensor, name, RunError).dim() != 2 or tensor.shape != cos.shape:
                raise RunError(f"{name} has shape {tuple(tensor.shape)}: pass [positions, rotary_dim / 2].")
        return Rotation(cos, sin, checks.flag("rotary_interleaved", interleaved, RunError))

    def check(self, head_dim: int, tokens: int) -> None:
        """Checks the tables for heads and for a request's most tokens; a card could not report a missing row."""
        rows, half = self.cos.shape
        if rows < tokens or 2 * half > head_dim:
            raise RunError(
                f"rotary_cos has shape {(rows, half)} but the cache has {tokens} tokens a request and heads of "
                f"{head_dim}. Pass a row for each token, and at most {head_dim // 2} columns."
            )

    def __call__(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """`x` [batch, rows, heads, dim] rotated in fp32; positions: [batch, rows or 1]."""
        half = self.cos.shape[1]
        cos, sin = (table[positions.long()].float().unsqueeze(2) for table in (self.cos, self.sin))
        turned, kept = x[..., : 2 * half].float(), x[..., 2 * half :]
        if self.interleaved:
            a, b = turned[..., 0::2], turned[..., 1::2]
            found = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
        else:
            a, b = turned[..., :half], turned[..., half:]
            found = torch.cat([a * cos - b * sin, a * sin + b * cos], -1)
        return torch.cat([found.to(x.dtype), kept], -1)


def append(
    k: torch.Tensor,
    v: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    tables: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """Writes k and v, [batch, rows, heads, dim], to the pages of `tables` at `positions` [batch, rows]."""
    batch, rows = positions.shape
    for name, new in (("k", k), ("v", v)):
        if new.shape[:2] != (batch, rows):
            raise RunError(f"{name} has shape {tuple(new.shape)}: pass [{batch}, {rows}, kv_heads, head_dim].")
    requests = torch.arange(batch, dtype=torch.int32, device=k.device)
    begins = torch.arange(batch + 1, dtype=torch.int32, device=k.device) * tables.shape[1]
    with named(_NAMES):
        append_paged_kv_cache(
            *(k.flatten(0, 1), v.flatten(0, 1), requests.repeat_interleave(rows), positions.flatten().int(), cache),
            *(tables.flatten(), begins, requests),
        )
