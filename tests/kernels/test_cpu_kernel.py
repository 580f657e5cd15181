"""The CPU kernel under hand-made plans, compared with the fp64 reference, for every level of CPU features."""

from __future__ import annotations

import contextlib
import os
import threading

import cpu_kernel
import pytest
import reference
import torch
from cpu_kernel import Inputs, KernelCase
from prebuild import quick_builds

from flashpage.jit import Target, build_kernels
from flashpage.jit.targets import runnable
from flashpage.kernels.spec import VariantSpec

BIAS = VariantSpec(
    logit="cap * tanh((score + gain(h) * to_float(kv_idx - q_idx)) / cap)",
    tensors=(("gain", "float32", 1),),
    scalars=(("cap", "float"),),
)
PARITY = VariantSpec(mask="(kv_idx % 3 != 1) || q_idx == kv_idx")
UNLIKE_FP8 = {"q_dtype": "float8_e5m2", "kv_dtype": "float8_e4m3fn", "out_dtype": "float16"}

CASES = [
    KernelCase("plain fp32, pages"),
    KernelCase("plain bf16", q_dtype="bfloat16"),
    KernelCase("plain fp16", q_dtype="float16"),
    KernelCase("ragged", page_size=0),
    KernelCase("page of one token", page_size=1, q_dtype="bfloat16"),
    KernelCase("page size that is no power of two", page_size=7),
    KernelCase("output in fp32 from bf16", q_dtype="bfloat16", out_dtype="float32"),
    KernelCase("causal", causal=True),
    KernelCase("causal, more rows than tokens: rows that see nothing", causal=True, q_lens=(9,), kv_lens=(4,)),
    KernelCase("causal prefill over several tiles", causal=True, q_lens=(150,), kv_lens=(203,), q_dtype="bfloat16"),
    KernelCase("window", causal=True, window_left=5, q_lens=(40, 1), kv_lens=(90, 33)),
    KernelCase("window without causal", window_left=0, q_dtype="bfloat16"),
    KernelCase("custom mask", has_mask=True),
    KernelCase("custom mask, bf16, cut", has_mask=True, q_dtype="bfloat16", piece=24, kv_lens=(70, 0, 129)),
    KernelCase("empty requests", q_lens=(0, 2, 0), kv_lens=(5, 0, 0)),
    KernelCase("cut units", piece=16, causal=True, q_dtype="bfloat16"),
    KernelCase("cut units and window: pieces that see nothing", piece=16, causal=True, window_left=3),
    KernelCase("sinks", has_sinks=True, kv_lens=(70, 0, 33)),
    KernelCase("sinks, cut", has_sinks=True, piece=32, q_dtype="bfloat16"),
    KernelCase("scales by head", has_scales=True),
    KernelCase("rope", rope=(1.0, 1e4), causal=True),
    KernelCase("rope, scaled, bf16", rope=(2.0, 5e5), q_dtype="bfloat16", q_lens=(30, 1), kv_lens=(300, 77)),
    KernelCase("e4m3 under bf16", q_dtype="bfloat16", kv_dtype="float8_e4m3fn", has_scales=True),
    KernelCase("e5m2 under fp16", q_dtype="float16", kv_dtype="float8_e5m2", has_scales=True),
    KernelCase("e4m3 under e4m3, bf16 out", q_dtype="float8_e4m3fn", out_dtype="bfloat16", has_scales=True),
    KernelCase("e4m3 under e5m2, rope", **UNLIKE_FP8, rope=(1.0, 1e4)),
    KernelCase("e4m3 under e5m2, no whole vector", **UNLIKE_FP8, dims=(24, 40), causal=True),
    KernelCase("e4m3 under fp32, rope", kv_dtype="float8_e4m3fn", rope=(1.0, 1e4)),
    KernelCase("e5m2 under bf16, no whole vector", q_dtype="bfloat16", kv_dtype="float8_e5m2", dims=(24, 40)),
    KernelCase("smallest head dims", dims=(16, 16), heads=(1, 1), q_dtype="bfloat16"),
    KernelCase("head dims that fill no vector", dims=(24, 40)),
    KernelCase("head dims that fill no vector, bf16", dims=(40, 24), q_dtype="bfloat16"),
    KernelCase("head dims that fill no vector, fp16", dims=(72, 8 * 13), q_dtype="float16"),
    KernelCase("largest head dims", dims=(512, 512), q_dtype="bfloat16", tile=(8, 32)),
    KernelCase("values wider than queries", dims=(64, 512), tile=(8, 32)),
    KernelCase("group of one", heads=(3, 3), q_dtype="bfloat16"),
    KernelCase("group of seven in tiles of five rows", heads=(7, 1), tile=(5, 32), causal=True),
    KernelCase("many row tiles", heads=(16, 2), q_lens=(20,), kv_lens=(64,), causal=True),
    KernelCase("variant: logit with a tensor and a scalar", variant=BIAS),
    KernelCase("variant: logit, bf16, causal", variant=BIAS, causal=True, q_dtype="bfloat16"),
    KernelCase("variant: mask", variant=PARITY, causal=True),
]
UNIT = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


def options(case: KernelCase, inputs: Inputs) -> reference.Options:
    q_scale, k_scale, v_scale = inputs.scales if case.has_scales else (1.0, 1.0, 1.0)
    values = {"gain": inputs.sinks.double(), "cap": 30.0}

    def score_mod(score, b, h, q_idx, kv_idx):
        return values["cap"] * torch.tanh((score + values["gain"][h] * (kv_idx - q_idx)) / values["cap"])

    return reference.Options(
        sm_scale=case.dims[0] ** -0.5,
        causal=case.causal,
        window_left=case.window_left,
        rope=case.rope,
        sinks=inputs.sinks if case.has_sinks else None,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale * 2.0 if case.has_scales else v_scale,
        score_mod=score_mod if case.variant is BIAS else None,
        mask_mod=(lambda b, h, q_idx, kv_idx: (kv_idx % 3 != 1) | (q_idx == kv_idx))
        if case.variant is PARITY
        else None,
    )


def runs() -> list[pytest.param]:
    """Every case at the best level and at the lowest one, whose vectors are half as wide; one at the middle level. At
    the lowest level those that are compiled as users have them are rare."""
    levels = runnable(None)
    found = [(case, target) for target in dict.fromkeys((levels[0], levels[-1])) for case in CASES]
    found += [(CASES[1], target) for target in levels[1:-1]]
    rare = {(case, levels[-1]) for case in CASES if levels[-1] != levels[0] and not is_quick(case)}
    marks = {True: pytest.mark.rare, False: ()}
    return [pytest.param(*run, id=f"{run[1].name}-{run[0].reason}", marks=marks[run in rare]) for run in found]


def is_quick(case: KernelCase) -> bool:
    """Every third case is compiled as users have it, the others quickly."""
    return CASES.index(case) % 3 != 0


def compilers(quick: bool) -> contextlib.AbstractContextManager[None]:
    return quick_builds() if quick else contextlib.nullcontext()


@pytest.fixture(scope="module")
def kernels(request: pytest.FixtureRequest) -> None:
    """All kernels of the collected tests, compiled in parallel."""
    params = [getattr(getattr(item, "callspec", None), "params", {}) for item in request.session.items]
    wanted = [(p["case"], p["target"]) for p in params if isinstance(p.get("case"), KernelCase)]
    for quick in (False, True):
        with compilers(quick):
            build_kernels((case.spec, target) for case, target in wanted if is_quick(case) == quick)


@pytest.mark.parametrize(("case", "target"), runs())
def test_kernel(case: KernelCase, target: Target, kernels: None) -> None:
    inputs = Inputs(case)
    with compilers(is_quick(case)):
        results = cpu_kernel.run(case, inputs, cpu_kernel.load_kernel(case.spec, target))
    starts = [sum(case.q_lens[:i]) for i in range(len(case.q_lens))]
    for request, (out, lse) in enumerate(results):
        rows = slice(starts[request], starts[request] + case.q_lens[request])
        mask = inputs.masks[request] if case.has_mask else None
        expected = reference.attention(
            inputs.q[rows],
            inputs.k[request],
            inputs.v[request],
            options(case, inputs),
            request=request,
            custom_mask=mask,
        )
        unit = UNIT[case.q_dtype if case.q_dtype in UNIT else case.out_dtype]  # fp8 queries are computed in fp32
        score_error = 64 * 2.0**-24 + (8 * unit if case.rope else 0.0)
        torch.testing.assert_close(lse.double(), expected.lse, rtol=1e-6, atol=score_error + 1e-6)
        limit = (unit + 2 * score_error) * (expected.magnitude + expected.out.abs()) + 1e-7
        error = (out.double() - expected.out).abs()
        assert not error.isnan().any()
        assert (error <= limit).all(), f"{(error / limit).max():.2f} of the limit"


def test_a_thread_with_a_small_stack() -> None:
    """The work of the widest heads has more than 512 KiB, which a program's threads may have as their stack."""
    case = KernelCase("widest work", dims=(512, 512), tile=(96, 64), kv_lens=(70,), q_lens=(3,))
    with quick_builds():
        library, inputs = cpu_kernel.load_kernel(case.spec, runnable(None)[0]), Inputs(case)
    if (child := os.fork()) == 0:
        threading.stack_size(512 << 10)
        thread = threading.Thread(target=cpu_kernel.run, args=(case, inputs, library))
        thread.start()
        thread.join()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, "it has overrun its stack"
