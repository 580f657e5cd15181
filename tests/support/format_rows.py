"""Rows of K and V in formats with scales: their exact values, and the bytes that a cache holds. Written from the
formats' descriptions, without the package's conversions."""

from __future__ import annotations

from typing import Any

import torch
from caches import Cache
from cases.case import Case
from format_names import EACH, kv_types

from flashpage.kernels import kv_formats
from flashpage.kernels.kv_formats import FORMATS

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
# For each format: the tensor's type, the scales' type, and the columns that share a scale (0: the whole row).
STORED: dict[str, tuple[torch.dtype, torch.dtype, int]] = {
    name: (
        kv_formats.torch_dtype(FORMATS[name].stored[0]),
        kv_formats.torch_dtype(FORMATS[name].scales[0]),
        FORMATS[name].scale_columns % kv_formats.WHOLE_ROW,
    )
    for name in EACH
}
Rows = list[torch.Tensor]


def names(case: Case) -> tuple[str, str]:
    """The formats of K and V."""
    k, _, v = case.kv_format.partition("+")
    return k, v or _base(k)


def plan_arguments(case: Case) -> dict[str, Any]:
    """The arguments of plan in place of an element type."""
    return {"kv_data_type": None} | kv_types(names(case) if "+" in case.kv_format else case.kv_format)


def exact(case: Case, k: Rows, v: Rows) -> tuple[Rows, Rows]:
    """The rows as caches hold them, in fp64."""
    if not case.kv_format:
        return k, v
    return tuple(
        [_read(name, *_quantised(name, row)) for row in rows] for name, rows in zip(names(case), (k, v), strict=True)
    )  # type: ignore[return-value]


def halves(case: Case, k: Rows, v: Rows) -> tuple[tuple[Rows, Rows], tuple[Rows, Rows]]:
    """Exact rows as bytes of the cache, and their scales as bytes."""
    found = [[_quantised(name, row) for row in rows] for name, rows in zip(names(case), (k, v), strict=True)]
    data, scales = ([[_bytes(part[i]) for part in side] for side in found] for i in (0, 1))
    return (data[0], data[1]), (scales[0], scales[1])


def values(case: Case, side: int, data: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The numbers in fp64 that bytes [tokens, heads, ...] of K (side 0) or V (1) and of their scales stand for."""
    name = names(case)[side]
    kind, scale_kind, _ = STORED.get(_base(name), (getattr(torch, name, None), torch.uint8, 0))
    return _read(name, data.contiguous().view(kind), scales.contiguous().view(scale_kind))


def row_bytes(case: Case) -> tuple[tuple[int, int], tuple[int, int]]:
    """Bytes of a row of K and of V, and of its scales."""
    ones = [
        _quantised(name, torch.ones(1, 1, dim))
        for name, dim in zip(names(case), (case.head_dim, case.value_dim), strict=True)
    ]
    return tuple(tuple(_bytes(one[i]).shape[2] for one in ones) for i in (0, 1))  # type: ignore[return-value]


def argument(case: Case, cache: Cache, device: str) -> Any:
    """The cache in its types."""
    types = [STORED[base][0] if (base := _base(name)) in STORED else getattr(torch, name) for name in names(case)]
    return _typed(cache.argument(device), types)


def scales_argument(case: Case, cache: Cache, device: str) -> Any:
    """kv_cache_sf: a side without scales has None, and rows with one scale have no dimension for it."""
    found = [STORED.get(_base(name)) for name in names(case)]
    given = _typed(cache.argument(device), [torch.uint8 if row is None else row[1] for row in found])
    parts = given if isinstance(given, tuple) else (given,)
    shown = [
        None if row is None else part if row[2] else part.squeeze(-1) for part, row in zip(parts, found, strict=False)
    ]
    return tuple(shown) if isinstance(given, tuple) else shown[0]


def hadamard(columns: int) -> torch.Tensor:
    found = torch.ones(1, 1, dtype=torch.float64)
    while len(found) < columns:
        found = torch.cat([torch.cat([found, found], 1), torch.cat([found, -found], 1)])
    return found / columns**0.5


def _base(name: str) -> str:
    return kv_formats.unrotated(name)


def _typed(given: Any, types: list[torch.dtype]) -> Any:
    if isinstance(given, tuple):
        return tuple(part if part.dtype is kind else part.view(kind) for part, kind in zip(given, types, strict=True))
    return given.view(types[0])


def _bytes(part: torch.Tensor) -> torch.Tensor:
    return part.contiguous().view(torch.uint8)


def _quantised(name: str, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers [tokens, heads, ...] and scales [tokens, heads, scales of a row]."""
    if _base(name) != name:
        rows = rows.double() @ hadamard(rows.shape[-1])
    rows = rows.double().nan_to_num(0.0, 0.0, 0.0).clamp(-1e3, 1e3)  # prebuild has rows without values
    base = _base(name)
    if base not in STORED:
        return rows.to(getattr(torch, name)), torch.empty(*rows.shape[:2], 0, dtype=torch.uint8)
    if base == "nvfp4":
        groups = rows.unflatten(2, (-1, 16))
        scales = (groups.abs().amax(3) / 6).to(torch.float8_e4m3fn)
        x = groups / scales.double().clamp(min=1e-30)[..., None]
        distance = (x.abs()[..., None] - E2M1).abs() + 1e-9 * (torch.arange(8) % 2)  # of two equal ones the even one
        found = distance.argmin(-1) + 8 * (x < 0).long()
        return _packed(found.flatten(2)), scales
    if base == "int4_token":
        least, most = rows.amin(2).clamp(max=0), rows.amax(2).clamp(min=0)
        words = ((most - least) / 15).float().view(torch.int32) & ~15
        scale = words.view(torch.float32).double().clamp(min=1e-30)
        zero = (-least / scale).round().clamp(0, 15)
        found = ((rows / scale[..., None]).round() + zero[..., None]).clamp(0, 15).long()
        return _packed(found), (words | zero.int()).view(torch.float32)[..., None]
    if base not in ("e4m3_token", "int8_token"):
        raise KeyError(base)
    scale = (rows.abs().amax(2) / (448 if base == "e4m3_token" else 127)).float()
    x = rows / scale.double().clamp(min=1e-30)[..., None]
    return (x.float().to(torch.float8_e4m3fn) if base == "e4m3_token" else x.round().to(torch.int8)), scale[..., None]


def _packed(numbers: torch.Tensor) -> torch.Tensor:
    return (numbers[..., 0::2] | numbers[..., 1::2] << 4).to(torch.uint8)


def _read(name: str, stored: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The elements that numbers and scales stand for."""
    base = _base(name)
    if base not in STORED:
        return stored.double()
    if stored.dtype is torch.uint8:
        stored = torch.stack([stored & 15, stored >> 4], -1).flatten(2).long()
    if base == "nvfp4":
        numbers = torch.cat([E2M1, -E2M1])[stored]
        return numbers * scales.double().repeat_interleave(16, 2)
    if base == "int4_token":
        words = scales.contiguous().view(torch.int32)
        rows = (stored - (words & 15)) * (words & ~15).view(torch.float32).double()
    else:  # _quantised refuses others
        rows = stored.double() * scales.double()
    return rows @ hadamard(rows.shape[-1]) if _base(name) != name else rows
