"""Conversions of the formats of K and V, number by number: what cards compute with is what the CPU reads."""

from __future__ import annotations

import ctypes
import functools
import re
from typing import Any

import pytest
import torch
from native_build import ROOT, shared_library

from flashpage.kernels.kv_formats import FORMATS, WHOLE_ROW, KvFormat

ROWS = [row for row in FORMATS.values() if not row.is_rotated]  # which differ from the others in nothing here
EACH = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
NUMBERS = {
    "nvfp4": [*E2M1, *(-number for number in E2M1)],
    "int4_token": list(range(16)),
    "int8_token": [*range(128), *range(-128, 0)],
    "e4m3_token": torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).tolist(),
}


@functools.cache
def compiled(row: KvFormat) -> Any:
    flags = ("-include", f"flashpage/formats/{row.header}.h", f"-DFORMAT={row.cpp}")
    library = ctypes.CDLL(str(shared_library("kv_formats.cpp", first_include="hopper", flags=flags)))
    library.number.restype = library.factor_of_pairs.restype = library.unit.restype = ctypes.c_float
    return library


def floats(count: int, values: Any = ()) -> Any:
    return (ctypes.c_float * count)(*values)


def same(found: list[float], wanted: list[float]) -> bool:
    return all(a == b or (a != a and b != b) for a, b in zip(found, wanted, strict=True))


@EACH
def test_each_number_is_what_its_bits_stand_for(row):
    library = compiled(row)
    assert same([library.number(stored) for stored in range(1 << row.bits)], NUMBERS[row.name])


@EACH
@pytest.mark.parametrize("is_half", [1, 0], ids=["fp16", "bf16"])
def test_cards_widen_every_number_exactly(row, is_half):
    """In every place of a word, times the scale of a block: each scale is a power of two here, or 1."""
    library, count = compiled(row), 32 // row.bits
    scale = torch.tensor([1.0]).to(torch.float8_e4m3fn) if row.scale_columns < WHOLE_ROW else torch.tensor([1.0])
    factor = library.factor_of_pairs(ctypes.c_void_p(scale.data_ptr()), is_half) * library.unit()
    for first in range(1 << row.bits):
        stored = [(first + 37 * i) % (1 << row.bits) for i in range(count)]
        word, numbers = sum(bits << row.bits * i for i, bits in enumerate(stored)), floats(count)
        library.widened(word, is_half, numbers)
        assert same([number * factor for number in numbers], [NUMBERS[row.name][bits] for bits in stored])


@pytest.mark.parametrize("is_half", [1, 0], ids=["fp16", "bf16"])
def test_products_of_nvfp4_are_exact(is_half):
    """A number times the scale of its block, in 16 bits, is exact for all 254 scales."""
    library, wide = compiled(FORMATS["nvfp4"]), torch.float16 if is_half else torch.bfloat16
    scales = torch.arange(0x7F, dtype=torch.uint8)
    for scale in scales:
        factor = library.factor_of_pairs(ctypes.c_void_p(scale.data_ptr()), is_half)
        numbers = floats(8)
        library.widened(0x76543210, is_half, numbers)
        products = (torch.tensor(list(numbers)).to(wide) * torch.tensor(factor).to(wide)).double() * library.unit()
        assert torch.equal(products, torch.tensor(E2M1).double() * scale.view(torch.float8_e4m3fn).double())


@EACH
def test_a_block_is_quantised_to_the_nearest_numbers(row):
    library, columns = compiled(row), min(row.scale_columns, 128)
    torch.manual_seed(1)
    for elements in (torch.randn(columns), torch.rand(columns) + 3, -torch.rand(columns), torch.zeros(columns)):
        read, scale = floats(columns), ctypes.create_string_buffer(4)
        library.quantise(floats(columns, elements.tolist()), columns, read, scale)
        factor, zero = ctypes.c_float(), ctypes.c_float()
        library.factors(scale, ctypes.byref(factor), ctypes.byref(zero))
        numbers = (torch.tensor(NUMBERS[row.name], dtype=torch.float64).nan_to_num(0) - zero.value) * factor.value
        found = torch.tensor(list(read), dtype=torch.float64)
        nearest = (elements[:, None].double() - numbers).abs().amin(1)
        error = (elements.double() - found).abs()
        largest = float(elements.abs().max())
        assert bool((error <= nearest + 1e-6 * largest).all())
        assert float(error.max()) <= largest / (5 if row.bits == 4 else 25)


@EACH
def test_no_kernel_names_a_format(row):
    """A sixth one is a file and a row."""
    words = re.compile(rf"\b{row.cpp}\b|formats/{row.header}\.h")
    sources = [
        path for folder in ("include", "csrc") for path in (ROOT / folder).rglob("*") if path.suffix in (".h", ".cpp")
    ]
    named = [path for path in sources if words.search(path.read_text()) and path.parent.name != "formats"]
    assert named == [] and len(sources) > 100
