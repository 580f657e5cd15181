"""Formats of other layouts than those of the package: a kernel that would read them wrong refuses them, in Python or by
a static assertion."""

from __future__ import annotations

import dataclasses
import subprocess
from typing import Any

import pytest
from native_build import FLAGS, ROOT

from flashpage.base.dtypes import DType
from flashpage.kernels import devices
from flashpage.kernels.choose import choose_for_card
from flashpage.kernels.kv_formats import FORMATS
from flashpage.kernels.options import Options
from flashpage.kernels.work import Problem

LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "8 bits, 16 columns": ("int8_token", {"scale_columns": 16}),
    "8 bits, zero points": ("int8_token", {"has_zero": True}),
    "4 bits, 32 columns": ("nvfp4", {"scale_columns": 32}),
    "4 bits, fp32 scales of 16 columns": ("nvfp4", {"scales": ("float32",)}),
    "4 bits, no zero point": ("int4_token", {"has_zero": False}),
}


@pytest.mark.parametrize("side", ["k_format", "v_format"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_decode_sm90_refuses_it(layout: tuple[str, dict[str, Any]], side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, change = layout
    monkeypatch.setitem(FORMATS, "other", dataclasses.replace(FORMATS[name], name="other", **change))
    chosen = {}
    for found in (name, "other"):
        formats = {"k_format": name, "v_format": name, side: found}
        options = Options("paged", 8, 2, 128, 128, 16, DType.BFLOAT16, DType.BYTES, DType.BFLOAT16, **formats)
        chosen[found] = choose_for_card(Problem(options, 4), devices.H200)
    assert chosen[name].kernel.name == "decode_sm90"
    assert chosen["other"].kernel.name == "attention_sm80"
    assert any("kv_format other is none of these" in note for note in chosen["other"].reasons)


ASSERTIONS = {
    "3 bits": (
        "#include <flashpage/formats/format.h>\nstruct F { static constexpr int bits = 3, scale_columns = 0; };\n"
        "constexpr int bytes = flashpage::row_bytes<F>(64);",
        "numbers with scales have 4 or 8 bits, plain elements 8, 16 or 32",
    ),
    "32 columns on a card": (
        "#include <hopper.h>\n#include <flashpage/kernels/helpers/append_quantised.h>\n"
        "#include <flashpage/formats/nvfp4.h>\nusing namespace flashpage;\n"
        "struct F : Nvfp4 { static constexpr int scale_columns = 32; };\n"
        "Nvfp4::Scale scale(QuantisedColumns<Half, F, 64>& row) { return row.find_scale(); }",
        "a scale belongs to 16 columns (one lane) or to the whole row",
    ),
    "group scales without their factor": (
        "#include <hopper.h>\n#include <flashpage/tile/load/format_rows.h>\n#include <flashpage/formats/e4m3_token.h>\n"
        "using namespace flashpage;\nstruct F : E4m3Token { static constexpr int scale_columns = 16; };\n"
        "void widen(u32 (&pairs)[4], u32 (&words)[2]) { widen_eight_of<F, Half>(pairs, words, 1.f); }",
        "scales of column groups, and no others, need scale_pair",
    ),
}


@pytest.mark.parametrize("given", ASSERTIONS.values(), ids=ASSERTIONS)
def test_an_assertion_refuses_it(given: tuple[str, str]) -> None:
    source, says = given
    command = ["g++", f"-I{ROOT / 'tests' / 'native' / 'hopper'}", *FLAGS, "-fsyntax-only", "-x", "c++", "-"]
    run = subprocess.run(command, input=source, capture_output=True, text=True)
    assert run.returncode != 0 and says in run.stderr, run.stderr
