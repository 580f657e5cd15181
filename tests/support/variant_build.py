"""Compiles rendered variants with g++ into one library, and evaluates each on scalars and on lanes, point by point."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch

from flashpage.jit import host_target
from flashpage.jit.compilers import find_cxx
from flashpage.kernels.spec import VariantSpec
from flashpage.native import VariantArgs
from flashpage.variants import TracedVariant, render

GROUP = 16  # neighbouring points share b, h and q_idx: one vector of lanes, or two

_PREAMBLE = """
#include "flashpage/cpu/variant_lanes.h"
using namespace flashpage;
template <class Variant>
void evaluate(const VariantArgs& args, int count, const float* score, const int* index, float* out, u8* visible,
              bool lanes) {
  const int step = lanes ? cpu::num_lanes : 1;
  for (int i = 0; i < count; i += step) {
    const int b = index[i * 4], h = index[i * 4 + 1], q = index[i * 4 + 2];
    if (!lanes) {
      out[i] = Variant::logit(args, score[i], b, h, q, index[i * 4 + 3]);
      visible[i] = Variant::mask(args, b, h, q, index[i * 4 + 3]);
      continue;
    }
    cpu::FloatLanes scores;
    cpu::IntLanes tokens;
    for (int l = 0; l < cpu::num_lanes; ++l) scores[l] = score[i + l], tokens[l] = index[(i + l) * 4 + 3];
    const vm::Floats result = Variant::logit(args, vm::Floats(scores), b, h, q, vm::Ints(tokens));
    const vm::Mask mask = Variant::mask(args, b, h, q, vm::Ints(tokens));
    for (int l = 0; l < cpu::num_lanes; ++l) out[i + l] = result.lanes[l], visible[i + l] = mask.lanes[l] != 0;
  }
}
"""
_ENTRY = """
namespace variant_{number} {{
{source}
}}
extern "C" void evaluate_{number}(const VariantArgs* args, int count, const float* score, const int* index, float* out,
                                  u8* visible, bool lanes) {{
  evaluate<variant_{number}::Variant>(*args, count, score, index, out, visible, lanes);
}}
"""


class CompiledVariants:
    """The compiled variants of `specs`, by number."""

    def __init__(self, specs: Sequence[VariantSpec], folder: Path) -> None:
        self.source = _PREAMBLE + "".join(
            _ENTRY.format(number=number, source=render(spec)) for number, spec in enumerate(specs)
        )
        source, library = folder / "variants.cpp", folder / "variants.so"
        source.write_text(self.source)
        compiler = find_cxx()
        assert compiler is not None
        command = compiler.command(source, library, host_target())
        subprocess.run([*command, "-O1", "-w"], check=True)
        self._library = ctypes.CDLL(str(library))

    def evaluate(
        self, number: int, variant: TracedVariant, score: torch.Tensor, index: torch.Tensor, lanes: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and visibility of all points: score [n] fp32, index [n, 4] int32 (b, h, q_idx, kv_idx)."""
        out, visible = torch.full_like(score, float("nan")), torch.zeros(len(score), dtype=torch.bool)
        arguments = variant_args(variant)
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (score, index, out, visible)]
        self._library[f"evaluate_{number}"](ctypes.byref(arguments), len(score), *pointers, ctypes.c_bool(lanes))
        return out, visible


def variant_args(variant: TracedVariant) -> VariantArgs:
    """The struct that kernels read, filled as a wrapper fills it."""
    arguments = VariantArgs()
    for slot, tensor in enumerate(variant.tensors):
        arguments.tensors[slot].data = tensor.data_ptr()
        for dim, stride in enumerate(tensor.stride()):
            arguments.tensors[slot].stride[dim] = stride
    for slot, value in enumerate(variant.scalars):
        arguments.scalars[slot] = value
    return arguments
