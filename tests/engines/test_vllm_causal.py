"""vLLM's steps with rows that see later tokens: cross attention, drafts and diffusion models, without vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_step import Form, Scene, close, run

from flashpage import CapabilityError
from flashpage.engines.plugin.group_plans import GroupPlans, Use
from flashpage.engines.vllm.plugin import causal_flags
from flashpage.engines.vllm.plugin.planner import GroupPlanner

pytestmark = pytest.mark.usefixtures("quick_kernels")

DIFFUSION = SimpleNamespace(diffusion_config=SimpleNamespace(canvas_length=16))
DRAFTS = SimpleNamespace(  # a DFlash drafter: 9 rows of a request see each other
    speculative_config=SimpleNamespace(num_speculative_tokens=8), attention_config=SimpleNamespace(use_non_causal=True)
)
CAUSAL_DRAFTS = SimpleNamespace(
    speculative_config=DRAFTS.speculative_config, attention_config=SimpleNamespace(use_non_causal=False)
)


def test_cross_attention(device: str) -> None:
    """Rows of a decoder see all tokens of an encoder; there may be fewer tokens than rows."""
    scene = Scene(Form(), [4, 1, 9], [60, 33, 17], device)
    planner = scene.planner()
    step = planner.plan(scene.common(causal=False))
    assert step.causal is False and planner.plan(scene.common()).causal is True
    step = planner.plan(scene.common(causal=False))
    close(run(step, planner.plans.layers[0], scene.tensors()), scene.expected(causal=False))


@pytest.mark.parametrize("sizes", [{}, {"graph_rows": 64, "captures_all": True}], ids=["eager", "captured"])
def test_causal_requests_next_to_others(sizes: dict[str, Any], device: str) -> None:
    """As vLLM's diffusion models have them; a second step has other flags, and one row a request needs none."""
    for window, lens in ((None, [4, 1, 9]), (16, [4, 1, 9]), (None, [1, 1, 1])):
        scene = Scene(Form(window=window), lens, [60, 33, 17], device)
        layers, full = [scene.form.layer()], scene.sizes(**sizes)
        assert causal_flags.refusal(DIFFUSION, layers[0]) is None
        flags = causal_flags.flags_of(DIFFUSION, full.max_requests, scene.device)
        assert flags is not None
        planner = GroupPlanner(GroupPlans(layers, full, scene.device, mask=flags.variant), None, flags)
        apart = [scene.expected(causal=is_causal).split(lens) for is_causal in (False, True)]
        for given in ([1, 0, 0], [0, 1, 1]):
            common = scene.common(causal=torch.tensor(given, dtype=torch.int32, device=scene.device))  # type: ignore[arg-type]
            step = planner.plan(common)
            assert step.causal is False
            expected = torch.cat([apart[flag][i] for i, flag in enumerate(given)])
            close(run(step, layers[0], scene.tensors()), expected)
        assert (Use.DECODE in planner.plans._attentions) == (max(lens) == 1 and not sizes)


def test_models_without_causal_flags() -> None:
    for config in (SimpleNamespace(), SimpleNamespace(diffusion_config=None)):
        assert causal_flags.flags_of(config, 4, torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("config", "form", "ranks", "message"),
    [
        (DIFFUSION, Form(), 1, None),
        (DIFFUSION, Form(window=16), 1, None),
        (DIFFUSION, Form(window=15), 1, "no windows shorter than the canvas of 16 tokens (here 15)"),
        (DIFFUSION, Form(slopes=(0.5, 0.25, 0.1, 0.05)), 1, "no ALiBi"),
        (DIFFUSION, Form(), 2, "no decode context parallelism"),
        (DIFFUSION, Form(window=4, is_encoder=True), 1, None),
        (DRAFTS, Form(), 1, None),
        (DRAFTS, Form(window=9), 1, None),
        (DRAFTS, Form(window=8), 1, "with 8 drafts a request has 9 rows that see later tokens too"),
        (CAUSAL_DRAFTS, Form(window=4, slopes=(0.5, 0.25, 0.1, 0.05)), 2, None),
        (SimpleNamespace(speculative_config=None), Form(window=4), 1, None),
    ],
)
def test_layers_that_are_refused_at_configuration(config: Any, form: Form, ranks: int, message: str | None) -> None:
    found = causal_flags.refusal(config, form.layer(), ranks)
    assert found is message if message is None else message in (found or "")


@pytest.mark.parametrize(
    ("causal", "window", "message"),
    [(torch.ones(3), None, "causal differs between the requests"), (False, 4, "a request has 9 rows .* window of 4")],
)
def test_what_cannot_be_planned(causal: Any, window: int | None, message: str) -> None:
    scene = Scene(Form(window=window), [4, 1, 9], [60, 33, 17], "cpu")
    with pytest.raises(CapabilityError, match=message):
        scene.planner().plan(scene.common(causal=causal))
