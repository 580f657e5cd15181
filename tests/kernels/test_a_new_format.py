"""A format of 8 bits with one scale a row needs a file and a row, on the CPU."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from pathlib import Path

import pytest
import torch

import flashpage
from flashpage.base import paths
from flashpage.jit.compilers import fixed_flags
from flashpage.jit.targets import host_target
from flashpage.kernels import json_records, kv_formats, spec

HEADER = """// One bit in a byte: 0 is -1 and 1 is +1, times an fp32 scale for a token and head.
#pragma once
#include "flashpage/formats/token_scale.h"

namespace flashpage {

struct SignToken : TokenScale<1> {
  static constexpr int bits = 8;
  FP_HOST_DEVICE static float number(u32 stored) { return stored ? 1.f : -1.f; }
  FP_HOST_DEVICE static u32 stored(float element, Scale) { return element < 0.f ? 0 : 1; }
};

}  // namespace flashpage
"""


@pytest.fixture
def name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A format in an include folder that has the package's headers, too."""
    (tmp_path / "flashpage" / "formats").mkdir(parents=True)
    package = paths.include_dir() / "flashpage"
    for entry in package.iterdir():
        if entry.name != "formats":
            (tmp_path / "flashpage" / entry.name).symlink_to(entry)
    for header in (package / "formats").iterdir():
        (tmp_path / "flashpage" / "formats" / header.name).symlink_to(header)
    (tmp_path / "flashpage" / "formats" / "sign_token.h").write_text(HEADER)
    monkeypatch.setattr(paths, "include_dir", lambda: tmp_path)
    row = dataclasses.replace(kv_formats.FORMATS["int8_token"], name="sign_token", header="sign_token", cpp="SignToken")
    monkeypatch.setitem(kv_formats.FORMATS, "sign_token", row)
    for field in ("k_format", "v_format"):  # which were made of the rows at import
        monkeypatch.setitem(spec._FIELDS, field, json_records.choice(*kv_formats.NAMES, "sign_token"))
    return "sign_token"


@pytest.mark.usefixtures("quick_kernels")
def test_appends_and_attention_over_a_new_format(name: str) -> None:
    torch.manual_seed(0)
    k, v = torch.randn(2, 20, 1, 64).bfloat16()
    cache = [torch.zeros(2, 16, 1, 64, dtype=torch.int8) for _ in range(2)]
    scales = [torch.zeros(2, 16, 1) for _ in range(2)]
    indptr, indices, last = torch.tensor([0, 2]), torch.tensor([1, 0]), torch.tensor([4])
    places = (torch.zeros(20, dtype=torch.int32), torch.arange(20))
    flashpage.append_paged_kv_cache(*(k, v, *places, cache, indices, indptr, last), kv_format=name, kv_cache_sf=scales)
    assert torch.equal(cache[0][1, :, 0], (k[:16, 0] >= 0).to(torch.int8))
    wrapper = flashpage.BatchDecodeWithPagedKVCacheWrapper(torch.empty(16 << 20, dtype=torch.uint8))
    wrapper.plan(indptr, indices, last, 1, 1, 64, 16, q_data_type=torch.bfloat16, kv_format=name)
    q = torch.randn(1, 1, 64).bfloat16()
    found = wrapper.run(q, tuple(cache), kv_cache_sf=tuple(scales))
    signs = [torch.where(part[:, 0] < 0, -1.0, 1.0) * part[:, 0].float().abs().amax(1, True) for part in (k, v)]
    expected = ((q[0].float() @ signs[0].T) * 64**-0.5).softmax(-1) @ signs[1]
    assert torch.allclose(found[0].float(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("bits", [2, 5, 6, 16])
def test_other_bits_are_refused(bits: int) -> None:
    with pytest.raises(ValueError, match=f"odd has bits={bits}: pass 4 or 8"):
        dataclasses.replace(kv_formats.FORMATS["int8_token"], name="odd", bits=bits)


@pytest.mark.parametrize("call", ["stored_number<Odd>(row, 0)", "cpu::store_numbers<Odd>(&element, 0, 1, {}, row)"])
def test_headers_refuse_other_bits(tmp_path: Path, call: str) -> None:
    source = tmp_path / "odd.cpp"
    source.write_text(
        '#include "flashpage/cpu/append_quantised.h"\n#include "flashpage/formats/token_scale.h"\n'
        "using namespace flashpage;\n"
        "struct Odd : TokenScale<1> {\n  static constexpr int bits = 5;\n"
        "  static u32 stored(float, Scale) { return 0; }\n};\n"
        f"void use(u8* row, float element) {{ {call}; }}\n"
    )
    command = ["g++", *fixed_flags(host_target())["g++"], "-fsyntax-only", f"-I{paths.include_dir()}", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"LC_ALL": "C"})
    assert "numbers with scales have 4 or 8 bits" in done.stderr
    source.write_text(source.read_text().replace("bits = 5", "bits = 8"))
    assert subprocess.run(command).returncode == 0
