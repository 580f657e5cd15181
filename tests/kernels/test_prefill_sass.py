"""The machine code of the Hopper prefill kernel: its wgmmas are not serialised, and no register spills."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from aot import build as aot_build
from flashpage.base.dtypes import DType
from flashpage.jit import Target, build_kernels
from flashpage.jit.compilers import find_nvcc
from flashpage.kernels import choose, devices
from flashpage.kernels.options import Options
from flashpage.kernels.spec import KernelSpec
from flashpage.kernels.wgmma_source import render, short_tokens
from flashpage.kernels.work import Problem
from flashpage.plan.prepared_kernels import mask_tiles_spec
from flashpage.variants import Variant


def prefill_spec(
    dim: int, dtype: DType = DType.BFLOAT16, loader: str = "boxes", position_encoding: str = "none"
) -> KernelSpec:
    cache = DType.FLOAT8_E4M3 if loader in ("converted", "transposed") else dtype
    query = cache if loader == "transposed" else dtype
    options = Options(
        kv_source="paged",
        num_q_heads=1,
        num_kv_heads=1,
        head_dim_qk=dim,
        head_dim_vo=dim,
        page_size=1 if loader == "rows" else 16,
        q_dtype=query,
        kv_dtype=cache,
        out_dtype=dtype,
        position_encoding="ROPE_LLAMA" if position_encoding == "rope" else "NONE",
    )
    spec = choose.choose_for_card(Problem(options, 128), devices.H200).spec
    assert (spec.kernel, spec.loader) == ("prefill_sm90", loader)
    return spec


def test_fp8_products_sum_over_32() -> None:
    spec = prefill_spec(128, loader="transposed")
    assert spec.tile is not None
    found = re.findall(r"m64n(\d+)k(\d+)\.f32\.e4m3\.e4m3 .*\n.*accumulate, 1, 1;", render(spec))
    assert found == [(str(spec.tile.tile_kv), "32"), ("128", "32")]  # there is no word of transposed factors


@pytest.mark.parametrize(("dim", "dtype", "name"), [(128, DType.BFLOAT16, "bf16"), (72, DType.FLOAT16, "f16")])
def test_products_name_their_registers(dim: int, dtype: DType, name: str) -> None:
    source = render(prefill_spec(dim, dtype))
    tile = prefill_spec(dim, dtype).tile
    assert tile is not None
    shapes = re.findall(r"m64n(\d+)k16\.f32\.(\w+)\.\w+ \{([^}]*)\}", source)
    short = short_tokens(prefill_spec(dim, dtype))
    assert short == (80 if dim == 128 else 0)
    keys = [tile.tile_kv, short] if short else [tile.tile_kv]
    assert [int(columns) for columns, _, _ in shapes] == [*keys, -(-dim // 16) * 16]
    for columns, kind, registers in shapes:
        assert kind == name
        assert registers == ", ".join(f"%{i}" for i in range(int(columns) // 2))


@pytest.mark.parametrize(
    ("dim", "loader", "position_encoding"),
    [
        *((128, "boxes", "none"), (256, "boxes", "none"), (128, "converted", "none")),
        *((64, "transposed", "none"), (128, "transposed", "none"), (256, "transposed", "none")),
        *((64, "boxes", "rope"), (256, "boxes", "rope"), (128, "rows", "rope")),
    ],
)
def test_ci_looks_at_the_machine_code(dim: int, loader: str, position_encoding: str) -> None:
    """`python -m aot.build --check` fails where registers spill and where ptxas serialises products."""
    spec = prefill_spec(dim, loader=loader, position_encoding=position_encoding)
    target = Target("cuda", 90)
    assert (spec, target) in aot_build.checked([target.name])


CODES = torch.zeros(4, 8, dtype=torch.int32)
FUNCTIONS = {
    "loads": lambda b, h, q_idx, kv_idx: (CODES[b, q_idx] == CODES[b, kv_idx]) & (kv_idx <= q_idx),
    "heads": lambda b, h, q_idx, kv_idx: (q_idx - kv_idx < CODES[b, h]) | (kv_idx % 7 < 2),
}


@pytest.mark.rare
@pytest.mark.skipif(find_nvcc() is None, reason="no nvcc")
@pytest.mark.parametrize("function", FUNCTIONS)
def test_machine_code_of_mask_functions(function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel that finds a function's tiles, and the one that evaluates it in mixed tiles, both with large tiles."""
    monkeypatch.setattr(devices, "of", lambda _: devices.H200)
    options = Options(
        kv_source="paged",
        num_q_heads=32,
        num_kv_heads=8,
        head_dim_qk=128,
        head_dim_vo=128,
        page_size=16,
        q_dtype=DType.BFLOAT16,
        kv_dtype=DType.BFLOAT16,
        out_dtype=DType.BFLOAT16,
    )
    variant = Variant(mask_mod=FUNCTIONS[function]).traced().spec
    choice = choose.choose(Problem(options, 4096), torch.device("cuda:0"), variant)
    kernels = [choice.spec, mask_tiles_spec(choice, options)]
    for result in build_kernels([(spec, Target("cuda", 90)) for spec in kernels if spec], tmp_path):
        assert result.error is None
        assert (result.spill_bytes, result.serial_products) == (0, 0), result.spec.name
