"""Rendered variants compile for the card with nvcc and with NVRTC, which sees only our headers; a compiler's message
about a user's expression names the expression."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from variant_examples import DOCUMENTED, OPERATIONS, SLOPES

from flashpage.jit import Target
from flashpage.jit.compilers import Compiler, find_cxx, find_nvcc, find_nvrtc
from flashpage.kernels.spec import VariantSpec
from flashpage.variants import Variant, builtin, compose, render

_KERNEL = """
namespace variant_{number} {{
{source}
}}
extern "C" __global__ void evaluate_{number}(const __grid_constant__ flashpage::VariantArgs args, float* score,
                                             int count) {{
  for (int i = threadIdx.x; i < count; i += blockDim.x) {{
    bool visible = variant_{number}::Variant::mask(args, 0, blockIdx.x, count, i);
    score[i] = visible ? variant_{number}::Variant::logit(args, score[i], 0, blockIdx.x, count, i) : -1.f;
  }}
}}
"""
COMPILERS = {"nvcc": find_nvcc, "nvrtc": find_nvrtc}


def compiler(name: str) -> Compiler:
    found = COMPILERS[name]()
    if found is None:
        pytest.skip(f"{name} is not on this machine")
    return found


def compile_for_card(
    name: str, specs: list[VariantSpec], folder: Path, arch: str = "sm_90a"
) -> subprocess.CompletedProcess[str]:
    source = folder / "variants.cu"
    kernels = [_KERNEL.format(number=number, source=render(spec)) for number, spec in enumerate(specs)]
    source.write_text('#include "flashpage/params/variant.h"\n' + "".join(kernels))
    command = compiler(name).command(source, folder / "variants.cubin", Target.parse(arch))
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("name", "arch"), [("nvcc", "sm_90a"), ("nvcc", "sm_80"), ("nvrtc", "sm_90a")])
def test_every_example_compiles(name: str, arch: str, tmp_path: Path) -> None:
    examples = DOCUMENTED + OPERATIONS
    specs = [Variant(example.score_mod, example.mask_mod).traced().spec for example in examples]
    result = compile_for_card(name, [*specs, builtin(30.0, SLOPES).spec], tmp_path, arch)
    log = result.stdout + result.stderr
    assert result.returncode == 0, log
    assert "warning" not in log, log
    assert (tmp_path / "variants.cubin").stat().st_size > 0


WRONG = compose(builtin(30.0), Variant(logit="score * factr", mask="kv_idx <").traced())


@pytest.mark.parametrize("name", ["nvcc", "nvrtc"])
def test_error_names_the_users_expression_on_the_card(name: str, tmp_path: Path) -> None:
    result = compile_for_card(name, [WRONG.spec], tmp_path)
    log = result.stdout + result.stderr
    assert result.returncode != 0
    assert 'flashpage variant: logit(2): error: identifier "factr" is undefined' in log, log
    assert "flashpage variant: mask(1): error: expected an expression" in log, log


def test_error_names_the_users_expression_on_the_cpu(tmp_path: Path) -> None:
    source = tmp_path / "variant.cpp"
    source.write_text('#include "flashpage/params/variant.h"\n' + render(WRONG.spec))
    cxx = find_cxx()
    assert cxx is not None
    command = cxx.command(source, tmp_path / "variant.so", Target.parse("avx2"))
    log = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    assert "flashpage variant: logit:2" in log and "‘factr’ was not declared" in log, log
    assert "flashpage variant: mask:1" in log, log


def test_wrong_number_of_indices_is_reported(tmp_path: Path) -> None:
    spec = Variant(logit="score + slopes(h, kv_idx)", tensors={"slopes": SLOPES}).traced().spec
    result = compile_for_card("nvcc", [spec], tmp_path)
    assert "the number of dimensions of slopes is 1" in result.stdout + result.stderr
