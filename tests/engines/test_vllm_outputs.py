"""vLLM's layers with outputs of e4m3, which its fusion of attention and quantization asks for, without vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_step import Form, Scene, run

from flashpage.engines.plugin.group_plans import Use
from flashpage.engines.plugin.refusal import refusal
from flashpage.engines.vllm.plugin import output_quant
from flashpage.kernels import choose, devices
from flashpage.kernels.work import Problem
from flashpage.wrappers.plan_arguments import DecodeArguments, PrefillArguments

pytestmark = pytest.mark.usefixtures("quick_kernels")

E4M3 = torch.float8_e4m3fn
DECODE = ([1, 1, 1, 1], [5, 64, 130, 33])
MIXED = ([1, 1, 7, 40], [50, 9, 7, 90])
SCALE = 0.002  # some numbers are beyond 448 of these


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Within a rounding to e4m3, and a little for the products."""
    wanted = (expected / SCALE).clamp(-448, 448)
    assert (wanted.abs() == 448).any() and not found.isnan().any()
    error = (found.cpu().double() - wanted).abs()
    assert bool((error <= wanted.abs() * 2**-4 + 0.004 / SCALE).all())
    assert error.mean() < 0.03 * wanted.abs().mean()


@pytest.mark.parametrize(
    ("lens", "sizes", "uses"),
    [
        (DECODE, {}, {Use.DECODE}),
        (DECODE, {"graph_requests": 8}, {Use.DECODE_IN_GRAPH}),
        (MIXED, {}, {Use.ROWS}),
        (MIXED, {"has_exact_lengths": False}, {Use.DECODE, Use.ROWS}),
        (MIXED, {"graph_rows": 64, "captures_all": True}, {Use.ROWS_IN_GRAPH}),
    ],
)
@pytest.mark.parametrize("form", [Form(), Form(kv_type="fp8", window=40, sinks=True)], ids=["usual", "fp8"])
def test_outputs(
    form: Form, lens: tuple[list[int], list[int]], sizes: dict[str, Any], uses: set[Use], device: str
) -> None:
    """Layers of 16 bits in the same group keep theirs; the scale is read where it lies."""
    scene = Scene(form, *lens, device)
    layers = [form.layer().with_outputs(E4M3), form.layer()]
    planner = scene.planner(layers, **sizes)
    step = planner.plan(scene.common())
    assert set(planner.plans._attentions) == uses
    tensors = scene.tensors()
    scale = torch.full((1, 1), SCALE, device=scene.device)
    narrow = tensors._replace(output=tensors.output.to(E4M3), scales=(*tensors.scales, scale))
    close(run(step, layers[0], narrow).float(), scene.expected())
    wide = run(step, layers[1], tensors)
    assert wide.dtype is form.dtype
    close((wide.float() / SCALE).clamp(-448, 448), scene.expected())


def test_rows_of_layers_that_kernels_do_not_serve() -> None:
    rows = torch.tensor([[1.0, -2.06, 500.0, -500.0, 0.001]], dtype=torch.bfloat16)
    found = output_quant.quantize(rows, torch.tensor([[0.5]]), torch.empty(rows.shape, dtype=E4M3))
    assert found.float().tolist() == [[2.0, -4.0, 448.0, -448.0, 0.001953125]]


@pytest.mark.parametrize(
    ("model", "ranks", "expected"),
    [(False, 1, True), (False, 2, False), (True, 1, False), (None, 1, True)],
    ids=["usual", "context parallel", "with an encoder", "no model"],
)
def test_what_is_served(model: bool | None, ranks: int, expected: bool) -> None:
    given = None if model is None else SimpleNamespace(is_encoder_decoder=model)
    assert output_quant.is_served(SimpleNamespace(model_config=given), ranks) is expected


def test_kernels_that_serve_a_layer_write_e4m3() -> None:
    """So the answer to vLLM's pass needs no card."""
    for card in (*devices.CARDS, devices.CPU):
        for head_dim in (16, 72, 80, 128, 256, 504, 512):
            for kv_dtype in (torch.bfloat16, E4M3):
                capability = None if card is devices.CPU else divmod(card.sm, 10)
                assert refusal(head_dim, torch.bfloat16, kv_dtype, 16, capability) is None
                types: dict[str, Any] = {"q_data_type": torch.bfloat16, "kv_data_type": kv_dtype, "o_data_type": E4M3}
                decode, _ = DecodeArguments(1, 1, head_dim, 16, **types).checked()
                prefill, _ = PrefillArguments("paged", 1, 1, head_dim, 16, causal=True, **types).checked()
                for options, rows in ((decode, 1), (prefill, choose.MANY_ROWS)):
                    choose.choose_for_card(Problem(options, rows), card)
