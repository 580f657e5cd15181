"""Conversions of the formats of K and V, number by number: what cards compute with is what the CPU reads."""

from __future__ import annotations

import ctypes
import functools
import re
from typing import Any

import format_names
import pytest
import torch
from native_build import ROOT, shared_library

from flashpage.kernels.kv_formats import FORMATS, KvFormat, torch_dtype

EACH = pytest.mark.parametrize("row", [FORMATS[name] for name in format_names.EACH], ids=lambda row: row.name)
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
NUMBERS = {
    "nvfp4": [*E2M1, *(-number for number in E2M1)],
    "int4_token": list(range(16)),
    "int8_token": [*range(128), *range(-128, 0)],
    "e4m3_token": torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).tolist(),
}


def numbers_of(row: KvFormat) -> list[float]:
    assert row.name in NUMBERS, f"NUMBERS has no row {row.name}: write down what each of its numbers stands for"
    return NUMBERS[row.name]


@functools.cache
def compiled(row: KvFormat) -> Any:
    flags = ("-include", f"flashpage/formats/{row.header}.h", f"-DFORMAT={row.cpp}")
    library = ctypes.CDLL(str(shared_library("kv_formats.cpp", first_include="hopper", flags=flags)))
    library.number.restype = library.factor_of_pairs.restype = library.left_out.restype = ctypes.c_float
    return library


def floats(count: int, values: Any = ()) -> Any:
    return (ctypes.c_float * count)(*values)


def same(found: list[float], wanted: list[float]) -> bool:
    return all(a == b or (a != a and b != b) for a, b in zip(found, wanted, strict=True))


@EACH
def test_each_number_is_what_its_bits_stand_for(row):
    library = compiled(row)
    assert same([library.number(stored) for stored in range(1 << row.bits)], numbers_of(row))


@EACH
@pytest.mark.parametrize("is_half", [1, 0], ids=["fp16", "bf16"])
def test_cards_widen_every_number_exactly(row, is_half):
    """Every number in every place of a word, with a scale of 1."""
    library, count = compiled(row), 32 // row.bits
    scale = torch.tensor([1.0]).to(torch_dtype(row.scales[0]))
    factor = library.factor_of_pairs(ctypes.c_void_p(scale.data_ptr()), is_half) * library.left_out()
    for first in range(1 << row.bits):
        stored = [(first + 37 * i) % (1 << row.bits) for i in range(count)]
        word, numbers = sum(bits << row.bits * i for i, bits in enumerate(stored)), floats(count)
        library.widened(word, is_half, numbers)
        assert same([number * factor for number in numbers], [numbers_of(row)[bits] for bits in stored])


@pytest.mark.parametrize("is_half", [1, 0], ids=["fp16", "bf16"])
def test_products_of_nvfp4_are_exact(is_half):
    """A number times the scale of its group, in 16 bits, is exact for all 127 scales that are not negative."""
    library, wide = compiled(FORMATS["nvfp4"]), torch.float16 if is_half else torch.bfloat16
    scales = torch.arange(0x7F, dtype=torch.uint8)
    for scale in scales:
        factor = library.factor_of_pairs(ctypes.c_void_p(scale.data_ptr()), is_half)
        numbers = floats(8)
        library.widened(0x76543210, is_half, numbers)
        products = (torch.tensor(list(numbers)).to(wide) * torch.tensor(factor).to(wide)).double() * library.left_out()
        assert torch.equal(products, torch.tensor(E2M1).double() * scale.view(torch.float8_e4m3fn).double())


@EACH
def test_a_group_is_quantised_to_the_nearest_numbers(row):
    library, columns = compiled(row), min(row.scale_columns, 128)
    torch.manual_seed(1)
    for elements in (torch.randn(columns), torch.rand(columns) + 3, -torch.rand(columns), torch.zeros(columns)):
        read, scale = floats(columns), ctypes.create_string_buffer(4)
        library.quantise(floats(columns, elements.tolist()), columns, read, scale)
        factor, zero = ctypes.c_float(), ctypes.c_float()
        library.factors(scale, ctypes.byref(factor), ctypes.byref(zero))
        numbers = (torch.tensor(numbers_of(row), dtype=torch.float64).nan_to_num(0) - zero.value) * factor.value
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
