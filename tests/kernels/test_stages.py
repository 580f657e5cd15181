"""How many stages of K and V fit: kernels' headers compute it, up to the most that the spec allows."""

from __future__ import annotations

import ctypes
import tempfile
from pathlib import Path

import pytest
from native_build import shared_library

HOPPER, ADA = 232448, 101376  # bytes of shared memory that a CTA may use

# Named as in tests/native/stages.cpp. Kernels were measured with these stages (docs/tried.md).
STAGES = {
    # type, columns of K and V, rows, tokens of a slot, teams, warps along the columns, loader, RoPE
    "decode_sm90<DecodeTraits<Bf16, 64, 64, 16, 32, 8, 1, Loader::boxes, false>>()": 16,
    "decode_sm90<DecodeTraits<Bf16, 80, 80, 16, 32, 8, 1, Loader::boxes, false>>()": 8,
    "decode_sm90<DecodeTraits<Bf16, 128, 128, 16, 32, 8, 1, Loader::boxes, false>>()": 8,
    "decode_sm90<DecodeTraits<Bf16, 128, 128, 16, 32, 8, 1, Loader::rows, true>>()": 8,
    "decode_sm90<DecodeTraits<E4m3, 128, 128, 64, 32, 2, 1, Loader::boxes, false>>()": 16,
    "decode_sm90<DecodeTraits<Bf16, 192, 128, 64, 16, 2, 1, Loader::boxes, false>>()": 12,
    "decode_sm90<DecodeTraits<Bf16, 256, 256, 64, 16, 2, 1, Loader::boxes, false>>()": 6,
    "decode_sm90<DecodeTraits<Bf16, 512, 512, 16, 16, 2, 4, Loader::boxes, false>>()": 4,
    # The rotation's table takes room from the ring.
    "decode_sm90<DecodeTraits<Bf16, 464, 224, 64, 16, 1, 2, Loader::boxes, false>>()": 5,
    "decode_sm90<DecodeTraits<Bf16, 464, 224, 64, 16, 1, 2, Loader::boxes, true>>()": 4,
    # loader, columns of K and V, tokens
    "prefill_sm90<PrefillTraits<Loader::converted, 64, 64, 128>>()": 3,
    "prefill_sm90<PrefillTraits<Loader::converted, 128, 128, 128>>()": 2,
    "prefill_sm90<PrefillTraits<Loader::transposed, 64, 64, 128>>()": 3,
    "prefill_sm90<PrefillTraits<Loader::transposed, 128, 128, 128>>()": 3,
    "prefill_sm90<PrefillTraits<Loader::transposed, 256, 256, 64>>()": 2,
    # type, columns of K and V, rows, tokens of all warps, warps, most stages, bytes of the ring
    "few_rows<FewRowsTraits<Bf16, 64, 64, 16, 128, 4, 4, 98304>>()": 3,
    "few_rows<FewRowsTraits<Bf16, 96, 96, 16, 64, 4, 4, 98304>>()": 4,
    "few_rows<FewRowsTraits<Bf16, 128, 128, 16, 64, 4, 4, 98304>>()": 3,
    "few_rows<FewRowsTraits<Bf16, 128, 128, 16, 64, 4, 4, 65536>>()": 2,
    "few_rows<FewRowsTraits<Bf16, 512, 512, 16, 64, 4, 4, 98304>>()": 2,
    # type, columns, rows, tokens of all warps, warps, most stages, bytes of the ring, of a CTA
    f"blocks<BlockTraits<Bf16, 128, 16, 64, 4, 4, 65536, {HOPPER}>>()": 2,
    f"blocks<BlockTraits<Bf16, 64, 16, 64, 4, 3, 98304, {HOPPER}>>()": 3,
    f"blocks<BlockTraits<Bf16, 32, 16, 128, 4, 4, 65536, {HOPPER}>>()": 4,
    f"blocks<BlockTraits<Bf16, 192, 16, 32, 2, 4, 98304, {ADA}>>()": 3,
    f"blocks<BlockTraits<Bf16, 256, 16, 32, 2, 4, 98304, {ADA}>>()": 2,
}


class Found(ctypes.Structure):
    """tests/native/stages.cpp"""

    _fields_ = [("stages", ctypes.c_int32), ("bytes", ctypes.c_int32)]


@pytest.fixture(scope="module")
def found() -> dict[str, Found]:
    """All in one file, which compiles in two seconds."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "shapes.h"
        path.write_text("".join(f"{shape},\n" for shape in STAGES))
        library = ctypes.CDLL(str(shared_library("stages.cpp", first_include="hopper", flags=(f'-DSHAPES="{path}"',))))
    return dict(zip(STAGES, (Found * len(STAGES)).in_dll(library, "found"), strict=True))


@pytest.mark.parametrize("shape", STAGES)
def test_kernels_take_the_stages_that_fit(shape: str, found: dict[str, Found]) -> None:
    assert found[shape].stages == STAGES[shape]
    assert found[shape].bytes <= (ADA if str(ADA) in shape else HOPPER)
