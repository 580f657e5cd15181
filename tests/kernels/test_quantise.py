"""Numbers are rounded to the nearest of 4 and 8 bits, as appends do (include/flashpage/ptx/quantise.h)."""

from __future__ import annotations

import ctypes

import pytest
import torch
from native_build import shared_library

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
KINDS = ("e2m1", "uint4", "int8", "e4m3")


def values_of(kind: str) -> torch.Tensor:
    """The number of each code."""
    codes = torch.arange(16 if kind in ("e2m1", "uint4") else 256)
    if kind == "e2m1":
        return torch.where(codes >= 8, -1.0, 1.0) * E2M1[codes % 8]
    if kind == "uint4":
        return codes.float()
    return codes.to(torch.uint8).view(torch.int8 if kind == "int8" else torch.float8_e4m3fn).float()


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    return ctypes.CDLL(str(shared_library("quantise.cpp", first_include="hopper")))


@pytest.mark.parametrize("kind", KINDS)
def test_rounded_to_the_nearest(library: ctypes.CDLL, kind: str) -> None:
    values = values_of(kind)
    generator = torch.Generator().manual_seed(2)
    numbers = torch.randn(4096, generator=generator) * {"e2m1": 3, "uint4": 6, "int8": 40, "e4m3": 100}[kind]
    numbers = numbers.clamp(-127, 127) if kind == "int8" else numbers
    numbers[:8] = torch.tensor([0.0, -0.0, 0.25, -0.75, 1.75, 2.5, -5.0, 100.0])  # ties go to even codes
    expected = [0, 8, 0, 10, 4, 4, 14, 7]
    factor, zero = 0.5, 7.0 if kind == "uint4" else 0.0
    codes: list[int] = []
    for eight in (numbers / factor).view(-1, 8):
        words = (ctypes.c_uint32 * 2)()
        given = (ctypes.c_float * 8)(*eight.tolist())
        arguments = (ctypes.byref(given), ctypes.c_float(factor), ctypes.c_float(zero), ctypes.byref(words))
        library.quantise_eight(KINDS.index(kind), *arguments)
        number, bits = words[0] | words[1] << 32, 4 if kind in ("e2m1", "uint4") else 8
        codes += [number >> bits * i & ((1 << bits) - 1) for i in range(8)]
    if kind == "e2m1":
        assert codes[:8] == expected
    error = (values[codes] - zero - numbers).abs()
    finite = values[~values.isnan()]
    best = (finite - zero - numbers[:, None]).abs().amin(dim=1)
    assert (error <= best * (1 + 2**-9) + numbers.abs() * 2**-10).all()
