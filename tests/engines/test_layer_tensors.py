"""Tensors of engines' layers that kernels read where they lie: scales of fp8 caches, and ALiBi's slopes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm_step import Form, Scene, close, run

from flashpage.engines.plugin.layers import LayerOptions, variant_of
from flashpage.run import bound_scales
from flashpage.run.checks import Scales
from flashpage.wrappers.base import Attention

pytestmark = pytest.mark.usefixtures("quick_kernels")

DECODE = ([1, 1, 1, 1], [5, 64, 130, 33])
MIXED = ([1, 1, 7, 40], [50, 9, 7, 90])


def in_tensors(*scales: float, device: Any) -> Scales:
    return None, *(torch.tensor(scale, device=device) for scale in scales)


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> list[Scales]:
    """The scales of the runs that are checked."""
    found: list[Scales] = []
    run_judged = Attention._run_judged

    def note(self: Attention, values: Any, tensors: Any, return_lse: bool, scales: Scales, *others: Any) -> Any:
        found.append(scales)
        return run_judged(self, values, tensors, return_lse, scales, *others)

    monkeypatch.setattr(Attention, "_run_judged", note)
    return found


@pytest.mark.parametrize("lens", [DECODE, MIXED], ids=["decode", "mixed"])
def test_scales_of_each_layer(lens: tuple[list[int], list[int]], device: str, judged: list[Scales]) -> None:
    """Only the first layer's run is checked. A change of the values in place is seen."""
    scene = Scene(Form(kv_type="fp8"), *lens, device)
    planner, layer = scene.planner(), scene.form.layer()
    step, scales = planner.plan(scene.common()), [in_tensors(*scene.scales, device=scene.device) for _ in range(3)]
    tensors = scene.tensors()
    for _ in range(2):
        for each in scales:
            close(run(step, layer, tensors._replace(scales=each)), scene.expected())
    assert judged == [scales[0]]
    scales[1][1].fill_(0.0)  # all tokens of a request have one weight
    changed = run(step, layer, tensors._replace(scales=scales[1])).clone()
    scene.scales = (0.0, scene.scales[1])
    close(changed, scene.expected())


def test_addresses_of_each_layer(judged: list[Scales], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a card the tensors of another layer are other addresses, which are set without a check, in both parts."""
    scene = Scene(Form(kv_type="fp8"), *MIXED, "cpu")
    planner, layer = scene.planner(), scene.form.layer()
    step, tensors = planner.plan(scene.common()), scene.tensors()

    def marks_of(scales: Scales, device: torch.device) -> Any:
        return tuple((s.data_ptr(),) if isinstance(s, torch.Tensor) else s for s in scales)

    monkeypatch.setattr(bound_scales, "marks_of", marks_of)
    each = [in_tensors(*scene.scales, device="cpu") for _ in range(2)]
    for scales in each:
        run(step, layer, tensors._replace(scales=scales))
    assert judged == [each[0]]
    bound = step.parts[0].attentions[layer.kind]._local.bound
    bound.parts.append(bound.parts[0].copy())
    for scales in each:
        assert bound.scales.take(scales)
        for part in bound.parts:
            assert [part.params.k_scale, part.params.v_scale] == [scale.data_ptr() for scale in scales[1:]]
    for other in ((None, 1.0, each[0][2]), (*each[0], 1.0), (None, None, None)):
        assert not bound.scales.take(other), other


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda scale: scale.double(), "dtype"),
        (lambda scale: scale.expand(3), "shape"),
        (lambda scale: scale.to("meta"), "is on meta"),
        (lambda scale: torch.nn.Parameter(scale), "requires grad"),
    ],
    ids=["fp64", "three", "another device", "gradient"],
)
def test_other_tensors_are_checked(change: Any, message: str, device: str) -> None:
    """After tensors that need no check."""
    scene = Scene(Form(kv_type="fp8"), *DECODE, device)
    step, layer, tensors = scene.planner().plan(scene.common()), scene.form.layer(), scene.tensors()
    scales = in_tensors(*scene.scales, device=scene.device)
    run(step, layer, tensors._replace(scales=scales))
    other = (None, change(scales[1]), scales[2])
    if message == "dtype" and device == "cpu":  # a number
        close(run(step, layer, tensors._replace(scales=other)), scene.expected())
        return
    with pytest.raises(ValueError, match=message):
        run(step, layer, tensors._replace(scales=other))


def test_slopes_are_those_that_the_layer_made(device: str) -> None:
    """Layers of other kinds with equal slopes share them."""
    form, place = Form(slopes=(0.11, 0.22, 0.33, 0.44)), torch.empty(0, device=device).device
    layer = form.layer()
    made = layer.slopes_on(place)
    assert made is not None and made.dtype is torch.float32 and made.tolist() == pytest.approx(form.slopes)
    for other in (layer, layer.with_outputs(torch.float8_e4m3fn), LayerOptions((4, 1, 128), 1.0, slopes=form.slopes)):
        assert variant_of(other.kind, place).tensors["slopes"] is made
    assert Form().layer().slopes_on(place) is None
    assert layer.slopes_on(torch.device("meta")) is None
