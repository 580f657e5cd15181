"""The kernel that quantises as it appends, on the host: it writes what the CPU's writes."""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any

import pytest
import torch
from native_build import shared_library, traits_flags

import flashpage
from flashpage.base.dtypes import DType
from flashpage.kernels.kv_formats import FORMATS, WHOLE_ROW, find, unrotated
from flashpage.kernels.spec import KernelSpec
from flashpage.wrappers.quantised_append import QuantisedWrite

pytestmark = pytest.mark.usefixtures("quick_kernels")

PAGE, PAGES, TOKENS = 4, 5, 9


@dataclasses.dataclass(frozen=True)
class Append:
    """One append of rows of two requests; entry 4 is padding."""

    k: str
    v: str
    dims: tuple[int, int] = (64, 64)
    heads: int = 3
    dtype: str = "bfloat16"
    layout: str = "NHD"
    gap: int = 0  # columns between given rows, which start anywhere then
    scales: tuple[float, float] = (1.0, 1.0)


APPENDS = {
    "nvfp4": Append("nvfp4", "nvfp4"),
    "nvfp4-scales": Append("nvfp4", "nvfp4", (80, 32), layout="HND", scales=(0.5, 2.0)),
    "e4m3": Append("e4m3_token", "e4m3_token", (72, 64), gap=1),
    "int8": Append("int8_token", "int8_token", dtype="float32", gap=4),
    "int4": Append("int4_token", "int4_token", dtype="float16"),
    "rotated": Append("int4_token_rotated", "int4_token", (128, 64)),
    "mixed": Append("nvfp4", "float16", (64, 24), dtype="float16"),
}
APPENDS |= {name: Append(name, unrotated(name)) for name in FORMATS.keys() - {append.k for append in APPENDS.values()}}


def memory(name: str, dim: int, append: Append, device: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A cache whose bytes are all 255, and its scales."""
    shape = (PAGES, PAGE, append.heads) if append.layout == "NHD" else (PAGES, append.heads, PAGE)
    row = find(name, DType.BYTES)
    cache = torch.full((*shape, row.row_bytes(dim)), 255, dtype=torch.uint8, device=device)
    cache = cache.view(getattr(torch, row.stored[0]))
    if row.is_plain:
        return cache, None
    scales = torch.full((*shape, row.row_scales(dim) * row.scale_size), 255, dtype=torch.uint8, device=device)
    found = scales.view(getattr(torch, row.scales[0]))
    return cache, found.squeeze(-1) if row.scale_columns == WHOLE_ROW else found


def write(append: Append, device: str = "cpu") -> list[torch.Tensor | None]:
    """Appends; returns K, V and their scales as bytes."""
    generator = torch.Generator().manual_seed(7)
    rows = []
    for dim in append.dims:
        wide = torch.randn(TOKENS, append.heads, dim + append.gap, generator=generator)
        wide *= 2.0 ** torch.arange(-4, 5)[:, None, None]  # rows of other sizes
        wide[2, 0] = 0
        wide[3, 1] *= 2.0**-135  # a scale that would be subnormal
        rows.append(wide.to(getattr(torch, append.dtype)).to(device)[..., append.gap :])
    ints = lambda *values: torch.tensor(values, dtype=torch.int32, device=device)
    places = (ints(0, 0, 0, 0, -1, 1, 1, 1, 1), ints(2, 3, 4, 5, -1, 0, 1, 2, 3))
    lists = (ints(3, 1, 4), ints(0, 2, 3), ints(2, 4))
    (k, k_sf), (v, v_sf) = (
        memory(name, dim, append, device) for name, dim in zip((append.k, append.v), append.dims, strict=True)
    )
    arguments: dict[str, Any] = {"kv_format": (append.k, append.v), "kv_cache_sf": (k_sf, v_sf)}
    flashpage.append_paged_kv_cache(
        *rows, *places, (k, v), *lists, append.layout, **arguments, k_scale=append.scales[0], v_scale=append.scales[1]
    )
    return [None if part is None else part.contiguous().view(torch.uint8).cpu() for part in (k, v, k_sf, v_sf)]


def run_kernel(write: QuantisedWrite, params: Any) -> int:
    """In place of QuantisedWrite._launch; returns how many threads would have ended the launch."""
    key, value = write._rows
    spec = KernelSpec(
        "append_quantised",
        q_dtype=DType.of(key.dtype),
        kv_dtype=DType.BYTES,
        head_dim_qk=key.shape[2],
        head_dim_vo=value.shape[2],
        k_format=unrotated(write.formats[0].name),
        v_format=write.formats[1].name,
    )
    library = shared_library("append_quantised.cpp", first_include="hopper", flags=traits_flags(spec))
    stopped: int = ctypes.CDLL(str(library)).append_quantised(ctypes.byref(params))
    return stopped


def check(append: Append, written: list[torch.Tensor | None], expected: list[torch.Tensor | None]) -> None:
    """Equal but for numbers in the middle of two, which a faster division may round to the other one, and for another
    sum where rows are rotated."""
    for found, wanted, name in zip(written, expected, (append.k, append.v) * 2, strict=True):
        if found is None or wanted is None:
            assert found is wanted
            continue
        differ = found != wanted
        assert differ.sum() <= (0.02 if "rotated" in name else 0.004) * differ.numel()
        steps = (found.int() - wanted.int())[differ].abs()
        assert all(step in (1, 16, 17) for step in steps.tolist())


EACH = pytest.mark.parametrize("append", APPENDS.values(), ids=APPENDS)


@EACH
def test_it_writes_what_the_cpu_writes(append: Append, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = write(append)
    monkeypatch.setattr(QuantisedWrite, "_launch", run_kernel)
    check(append, write(append), expected)


@EACH
def test_so_does_a_card(append: Append, device: str) -> None:
    check(append, write(append, device), write(append))


@pytest.mark.parametrize("scale", [1.0, 0.0, -1.0, float("inf"), float("nan")])
def test_a_captured_launch_ends_at_bad_scales(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a capture nothing reads scales on the card but the kernel; FlashInfer's ends the launch."""
    stopped = []

    def launch(given: QuantisedWrite, params: Any) -> None:
        number = ctypes.c_float(scale)
        params.v_scale, params.stops_at_bad_scales = ctypes.addressof(number), 1
        stopped.append(run_kernel(given, params))

    monkeypatch.setattr(QuantisedWrite, "_launch", launch)
    write(APPENDS["nvfp4"])
    assert bool(stopped[0]) == (scale != 1)
