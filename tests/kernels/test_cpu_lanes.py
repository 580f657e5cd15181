"""Functions on vector lanes: accuracy in units of the last place, and behaviour at the edges of fp32."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import arm_table
import numpy as np
import pytest
from native_build import QUICK_CXX

from flashpage.jit import Target
from flashpage.jit.compilers import find_cxx
from flashpage.jit.targets import runnable

_SOURCE = """
#include <cstdio>
#include <cstring>
#include "flashpage/cpu/variant_lanes.h"
using namespace flashpage;
// lanes FUNCTION: from floats on stdin, a multiple of num_lanes, to floats on stdout.
int main(int, char** words) {
  float values[cpu::num_lanes];
  while (std::fread(values, sizeof values, 1, stdin) == 1) {
    const vm::Floats x = cpu::load(values);
    vm::Floats y = x;
#define FUNCTION(name, expression) if (!std::strcmp(words[1], #name)) y = expression;
    FUNCTION(exp2_of_negative, cpu::exp2_of_negative(x.lanes))
    FUNCTION(exp, vm::exp(x))
    FUNCTION(log, vm::log(x))
    FUNCTION(tanh, vm::tanh(x))
    FUNCTION(sigmoid, vm::sigmoid(x))
    FUNCTION(bf16, cpu::bf16_to_float(cpu::float_to_bf16(x.lanes)))
    FUNCTION(half, cpu::half_to_float(cpu::float_to_half(x.lanes)))
    cpu::store(values, y.lanes);
    std::fwrite(values, sizeof values, 1, stdout);
  }
}
"""
EDGES = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 1e-38, 3.4e38, -3.4e38], np.float32)


Lanes = list[str]  # the command that evaluates a function, whose name follows
NEON = Target.parse("neon")
TARGETS = tuple(dict.fromkeys((runnable(None)[0], runnable(None)[-1], NEON)))


@pytest.fixture(scope="module", params=TARGETS, ids=lambda t: t.name)
def lanes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Lanes:
    """Those of 64-bit Arm run in qemu-user, where it is (tests/support/arm_table.py)."""
    target: Target = request.param
    folder: Path = tmp_path_factory.mktemp(target.name)
    is_foreign = target not in runnable(None)
    if is_foreign and arm_table.missing():
        pytest.skip(f"{' and '.join(arm_table.missing())} not found")
    with pytest.MonkeyPatch.context() as patch:
        if is_foreign:
            patch.setenv("FLASHPAGE_CXX", arm_table.CXX)
        elif os.environ.get("FLASHPAGE_CXX") == QUICK_CXX:  # whose code rounds in other places
            patch.delenv("FLASHPAGE_CXX")
        compiler = find_cxx()
    assert compiler is not None
    (folder / "lanes.cpp").write_text(_SOURCE)
    command = compiler.command(folder / "lanes.cpp", folder / "lanes", target)
    subprocess.run([word for word in command if word not in ("-shared", "-fPIC")], check=True)
    return [*(arm_table.EMULATOR if is_foreign else ()), str(folder / "lanes")]


def evaluate(lanes: Lanes, name: str, x: np.ndarray) -> np.ndarray:
    padded = np.resize(x.astype(np.float32), -(-len(x) // 16) * 16)
    done = subprocess.run([*lanes, name], input=padded.tobytes(), stdout=subprocess.PIPE, check=True)
    return np.frombuffer(done.stdout, np.float32)[: len(x)]


# name, function in fp64, range, units in the last place
ACCURACY: list[tuple[str, Callable[[np.ndarray], np.ndarray], tuple[float, float], float]] = [
    ("exp2_of_negative", np.exp2, (-125.0, 0.0), 1.5),
    ("exp", np.exp, (-87.0, 88.0), 2.0),
    ("log", np.log, (1e-37, 1e37), 1.5),
    ("log", np.log, (0.4, 2.5), 1.5),
    ("tanh", np.tanh, (-20.0, 20.0), 8.0),
    ("tanh", np.tanh, (-1e-3, 1e-3), 8.0),
    ("sigmoid", lambda x: 1 / (1 + np.exp(-x)), (-80.0, 80.0), 4.0),
]


@pytest.mark.parametrize(("name", "exact", "limits", "units"), ACCURACY, ids=[row[0] for row in ACCURACY])
def test_accuracy(lanes: Lanes, name: str, exact, limits: tuple[float, float], units: float) -> None:
    generator = np.random.default_rng(0)
    low, high = limits
    points = generator.uniform(low, high, 200_000)
    if low > 0:
        points = np.exp(generator.uniform(np.log(low), np.log(high), 200_000))
    points = points.astype(np.float32)
    expected = exact(points.astype(np.float64))
    error = np.abs(evaluate(lanes, name, points) - expected) / np.spacing(np.abs(expected).astype(np.float32))
    assert error.max() <= units, f"{error.max():.2f} at {points[error.argmax()]}"


def test_edges(lanes: Lanes) -> None:
    with np.errstate(all="ignore"):
        exact = EDGES.astype(np.float64)
        np.testing.assert_allclose(evaluate(lanes, "exp", EDGES), np.exp(exact).astype(np.float32), rtol=1e-6)
        logs = np.log(exact)
        np.testing.assert_allclose(evaluate(lanes, "log", EDGES), logs.astype(np.float32), rtol=1e-6)
        np.testing.assert_allclose(evaluate(lanes, "tanh", EDGES), np.tanh(exact).astype(np.float32), rtol=1e-6)
    powers = np.array([-np.inf, -1e9, -160.0, 0.0, np.nan])
    np.testing.assert_array_equal(evaluate(lanes, "exp2_of_negative", powers), [0, 0, 0, 1, np.nan])


def test_conversions_round_to_nearest_even(lanes: Lanes) -> None:
    generator = np.random.default_rng(1)
    points = np.concatenate(
        [EDGES[:5], generator.standard_normal(100_000) * 10.0 ** generator.integers(-4, 4, 100_000)]
    )
    points = points.astype(np.float32)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(evaluate(lanes, "half", points), points.astype(np.float16).astype(np.float32))
    import torch

    expected = torch.from_numpy(points).bfloat16().float().numpy()
    np.testing.assert_array_equal(evaluate(lanes, "bf16", points), expected)
