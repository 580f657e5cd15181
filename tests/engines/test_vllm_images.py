"""vLLM's steps with images whose tokens see each other in both directions, without vLLM."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_step import Common, Form, Scene, close, run

from flashpage.engines.plugin.group_plans import GroupPlans, Use
from flashpage.engines.plugin.refusal import refusal
from flashpage.engines.vllm.plugin import image_ranges
from flashpage.engines.vllm.plugin.planner import GroupPlanner
from flashpage.kernels import choose, devices
from flashpage.kernels.work import Problem
from flashpage.wrappers.plan_arguments import PrefillArguments

pytestmark = pytest.mark.usefixtures("quick_kernels")

Ranges = dict[int, list[tuple[int, int]]]  # positions of each request's images, first and last
CPU = torch.device("cpu")


@dataclasses.dataclass(frozen=True)
class Step:
    """A step's requests, and the uses that it must be planned for."""

    q_lens: list[int]
    kv_lens: list[int]
    ranges: Ranges
    uses: set[Use]
    form: Form = dataclasses.field(default_factory=Form)
    is_cut: bool = False  # whether the window cuts images
    sizes: dict[str, Any] = dataclasses.field(default_factory=dict)


IMAGE_LAST = [1, 1, 50, 40], [60, 33, 50, 90]  # two decodes, a prompt, a later chunk of one
DRAFTS = {"has_exact_lengths": False, "few_rows": 3}
STEPS = {
    "a whole prompt": Step([40], [40], {0: [(3, 30)]}, {Use.MASKED}),
    "two images, one next to the other": Step([64], [64], {0: [(0, 19), (20, 33)]}, {Use.MASKED}),
    "three images": Step([90], [90], {0: [(2, 19), (30, 41), (60, 89)]}, {Use.MASKED}),
    "a chunk that begins in an image": Step([40], [90], {0: [(30, 69)]}, {Use.MASKED}),
    "a chunk that ends in an image": Step([40], [60], {0: [(10, 15), (30, 69)]}, {Use.MASKED}),
    "a chunk inside an image": Step([20], [60], {0: [(10, 80)]}, {Use.MASKED}),
    "two requests": Step([40, 50], [60, 50], {0: [(30, 50)], 1: [(1, 20), (25, 45)]}, {Use.MASKED}),
    "an image, then text": Step([40, 50], [60, 50], {0: [(30, 50)], 1: []}, {Use.MASKED}),
    "decodes of images that are past": Step(
        [1, 1, 40], [60, 33, 50], {0: [(3, 50)], 1: [], 2: [(12, 40)]}, {Use.DECODE, Use.MASKED}
    ),
    "decodes and text before it": Step(*IMAGE_LAST, {0: [(3, 50)], 3: [(55, 80)]}, {Use.ROWS, Use.MASKED}),
    "a window": Step([1, 70], [60, 90], {1: [(40, 59), (65, 84)]}, {Use.DECODE, Use.MASKED}, Form(window=20)),
    "a window that cuts images": Step([90], [90], {0: [(10, 59)]}, {Use.MASKED}, Form(window=20), is_cut=True),
    "drafts before it": Step([3, 2, 40], [60, 33, 50], {2: [(12, 40)]}, {Use.FEW_ROWS, Use.MASKED}, sizes=DRAFTS),
    "drafts after it": Step([40, 3], [50, 60], {0: [(12, 40)], 1: [(2, 30)]}, {Use.MASKED}, sizes=DRAFTS),
    "drafts, and three rows of a prompt": Step(
        [3, 3], [60, 33], {1: [(10, 32)]}, {Use.FEW_ROWS, Use.MASKED}, sizes=DRAFTS
    ),
    "past images alone": Step([40], [90], {0: [(3, 30), (40, 50)]}, {Use.ROWS}),
    "an image that ends at the first row": Step([40], [90], {0: [(3, 50)]}, {Use.ROWS}),
    "later images alone": Step([40], [40], {0: [(40, 70)]}, {Use.ROWS}),
    "an image that begins at the last row": Step([40], [40], {0: [(39, 70)]}, {Use.ROWS}),
    "an image of one token": Step([40], [40], {0: [(20, 20)]}, {Use.ROWS}),
    "text": Step([1, 40], [50, 40], {0: [], 1: []}, {Use.ROWS}),
    "decodes": Step([1, 1], [50, 40], {0: [(2, 30)], 1: [(10, 60)]}, {Use.DECODE}),
    "captured decodes": Step(
        [1, 1], [50, 40], {0: [(2, 30)], 1: []}, {Use.DECODE_IN_GRAPH}, sizes={"graph_requests": 8}
    ),
    "e4m3": Step([1, 70], [60, 90], {1: [(40, 59)]}, {Use.DECODE, Use.MASKED}, Form(kv_type="fp8")),
    "all options": Step(
        [1, 70],
        [60, 90],
        {1: [(40, 59)]},
        {Use.DECODE, Use.MASKED},
        Form((6, 2, 80), 24, torch.float16, layout="HND", window=33, soft_cap=5.0, sinks=True),
    ),
}


def seen(step: Step) -> list[torch.Tensor]:
    """What vLLM's own backends show: causal and window, or the rows and tokens of one image. [rows, tokens] each."""
    found = []
    for request, (rows, tokens) in enumerate(zip(step.q_lens, step.kv_lens, strict=True)):
        q, t = torch.arange(tokens - rows, tokens)[:, None], torch.arange(tokens)
        in_window = q - t < (step.form.window or tokens)
        mask = (t <= q) & in_window
        for first, last in step.ranges.get(request, []):
            image = (first <= q) & (q <= last) & (first <= t) & (t <= last)
            mask |= image & in_window if step.is_cut else image
        found.append(mask)
    return found


def given(scene: Scene, ranges: Ranges) -> Common:
    return dataclasses.replace(scene.common(), mm_req_doc_ranges=ranges)


def planner_of(scene: Scene, **sizes: Any) -> GroupPlanner:
    full = scene.sizes(**sizes)
    images = image_ranges.ImageRanges(full, scene.device)
    plans = GroupPlans([scene.form.layer()], full, scene.device, mask=images.variant)
    return GroupPlanner(plans, images=images)


@pytest.mark.parametrize("name", STEPS)
def test_each_step(name: str, device: str) -> None:
    """Equal to a dense mask, and masked only where a request with rows of an image needs it."""
    step = STEPS[name]
    scene = Scene(step.form, step.q_lens, step.kv_lens, device)
    planner = planner_of(scene, **step.sizes)
    found = planner.plan(given(scene, step.ranges))
    assert set(planner.plans._attentions) == step.uses
    assert found.causal and (found.plan_again is None) == any(use in step.uses for use in (Use.MASKED, Use.ROWS))
    close(run(found, planner.plans.layers[0], scene.tensors()), scene.expected(masks=seen(step)))


def test_steps_follow_each_other(device: str) -> None:
    """A planner's memory holds the ranges of the last step alone; layers with other windows share its plans."""
    steps = [STEPS[name] for name in ("two requests", "a whole prompt", "text", "two images, one next to the other")]
    scenes = [Scene(step.form, step.q_lens, step.kv_lens, device) for step in steps]
    full = scenes[0].sizes()
    images = image_ranges.ImageRanges(full, scenes[0].device)
    layers = [Form().layer(), Form(window=32).layer()]
    planner = GroupPlanner(GroupPlans(layers, full, scenes[0].device, mask=images.variant), images=images)
    for scene, step in zip(scenes, steps, strict=True):
        planned = planner.plan(given(scene, step.ranges))
        for layer, form in zip(layers, (Form(), Form(window=32)), strict=True):
            shown = seen(dataclasses.replace(step, form=form))
            close(run(planned, layer, scene.tensors()), scene.expected(masks=shown))


def test_drafts_after_an_image(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host has bounds of their lengths, from which their rows in the ranges' memory must not be counted."""
    step = STEPS["drafts after it"]
    scene = Scene(step.form, step.q_lens, step.kv_lens, device)
    planner, common = planner_of(scene, **step.sizes), given(scene, step.ranges)
    common.seq_lens_cpu_upper_bound = torch.tensor(step.kv_lens, dtype=torch.int32) + torch.tensor([0, 9])
    monkeypatch.setattr(planner, "device", torch.device("cuda"))  # which reads no lengths of the device
    found = run(planner.plan(common), planner.plans.layers[0], scene.tensors())
    close(found, scene.expected(masks=seen(step)))


@pytest.mark.parametrize("name", ["decodes and text before it", "drafts before it"])
def test_another_default_device(name: str, device: str) -> None:
    """As an engine sets it that makes its tensors on a card; what the host counts stays there."""
    step = STEPS[name]
    scene = Scene(step.form, step.q_lens, step.kv_lens, device)
    planner, common = planner_of(scene, **step.sizes), given(scene, step.ranges)
    with torch.device("meta"):
        planned = planner.plan(common)
    close(run(planned, planner.plans.layers[0], scene.tensors()), scene.expected(masks=seen(step)))


def test_images_before_a_shared_prefix(device: str) -> None:
    """No cascade: it has no mask."""
    step = STEPS["two requests"]
    scene = Scene(step.form, step.q_lens, step.kv_lens, device)
    planner = planner_of(scene)
    found = planner.plan(given(scene, step.ranges), 16)
    close(run(found, planner.plans.layers[0], scene.tensors()), scene.expected(masks=seen(step)))


def test_lengths_that_only_the_device_has(device: str) -> None:
    """vLLM always has bounds of prompts on the host; without them lengths are copied."""
    step = STEPS["decodes of images that are past"]
    scene = Scene(step.form, step.q_lens, step.kv_lens, device)
    common = given(scene, step.ranges)
    images = image_ranges.ImageRanges(scene.sizes(), scene.device)
    assert images.take(common, None) == 2
    assert images._last[2:].tolist()[:40] == [40 if 12 <= row + 10 < 40 else -1 for row in range(40)]


def test_ranges_of_requests_that_a_step_has_not(device: str) -> None:
    """vLLM takes them from its batch, also in a step of its own that keeps other ranks company."""
    step = STEPS["decodes of images that are past"]
    scene = Scene(step.form, step.q_lens, step.kv_lens, device)
    planner = planner_of(scene)
    found = planner.plan(given(scene, step.ranges | {3: [(2, 30)], 7: [(2, 30)]}))
    close(run(found, planner.plans.layers[0], scene.tensors()), scene.expected(masks=seen(step)))


# ---------------------------------------------------------------- what is served


def config(**changes: Any) -> SimpleNamespace:
    """The fields of vLLM's configuration that are read, of a Gemma 3."""
    text = SimpleNamespace(**{"sliding_window": 32} | changes.pop("text", {}))
    usual = {
        "model_config": SimpleNamespace(is_mm_prefix_lm=changes.pop("sees", True), hf_text_config=text),
        "parallel_config": SimpleNamespace(use_ubatching=changes.pop("ubatching", False)),
    }
    return SimpleNamespace(**usual | changes)


def layers_of(*windows: int | None, cuts: bool = False) -> list[SimpleNamespace]:
    forms = [Form(window=window) for window in windows]
    return [
        SimpleNamespace(
            impl=SimpleNamespace(options=form.layer()), mm_prefix_clamp_sliding_window=cuts and form.window is not None
        )
        for form in forms
    ]


VISION = {"use_bidirectional_attention": "vision"}


@pytest.mark.parametrize(
    ("changes", "layers", "expected"),
    [
        ({}, layers_of(32, None), True),
        ({}, layers_of(64), True),
        ({"sees": False}, layers_of(16), False),
        ({}, layers_of(16), "images of up to 32 tokens, .* window of 16"),
        ({"text": {"sliding_window": None}}, layers_of(16), "images of up to any number of tokens, .* window of 16"),
        ({"text": {"sliding_window": None}}, layers_of(None), True),
        ({"text": VISION}, layers_of(16, 16, cuts=True), True),
        ({"text": VISION}, layers_of(None, cuts=True), False),
        ({"text": VISION}, layers_of(16, None, cuts=True), "share a KV cache group"),
        ({"text": VISION}, [*layers_of(16, cuts=True), *layers_of(16)], True),  # a drafter's, whose guesses are checked
    ],
)
def test_layers_that_see_images(changes: dict[str, Any], layers: list[Any], expected: bool | str) -> None:
    sizes = Scene(Form(), [1], [9], "cpu").sizes()
    if isinstance(expected, str):
        with pytest.raises(NotImplementedError, match=expected):
            image_ranges.ranges_of(config(**changes), layers, sizes, CPU)
    else:
        found = image_ranges.ranges_of(config(**changes), layers, sizes, CPU)
        assert (found is not None) is expected


SLOPES = (0.5, 0.25, 0.1, 0.05)


@pytest.mark.parametrize(
    ("changes", "form", "ranks", "is_invariant", "message"),
    [
        ({}, Form(window=16), 1, False, None),
        ({"sees": False, "ubatching": True}, Form(slopes=SLOPES), 2, True, None),
        ({"ubatching": True}, Form(is_encoder=True), 2, True, None),
        ({}, Form(), 2, False, "not served with decode context parallelism. Choose another"),
        ({}, Form(), 1, True, "batch invariance"),
        ({}, Form(slopes=SLOPES), 1, False, "ALiBi"),
        ({"ubatching": True}, Form(), 1, False, "steps in two halves"),
        ({"diffusion_config": SimpleNamespace(canvas_length=16)}, Form(), 1, False, "diffusion models"),
    ],
)
def test_what_is_refused_at_configuration(
    changes: dict[str, Any], form: Form, ranks: int, is_invariant: bool, message: str | None
) -> None:
    found = image_ranges.refusal(config(**changes), form.layer(), ranks, is_invariant)
    assert found is message if message is None else message in (found or "")


def test_kernels_that_serve_a_layer_serve_images() -> None:
    """So vLLM needs no reason of its own for images."""
    spec = image_ranges.ImageRanges(Scene(Form(), [1], [9], "cpu").sizes(), CPU).variant.traced().spec
    for card in (*devices.CARDS, devices.CPU):
        for head_dim in (16, 80, 128, 256, 504, 512):
            for q_dtype, kv_dtype in ((torch.bfloat16,) * 2, (torch.float16, torch.float8_e4m3fn)):
                capability = None if card is devices.CPU else divmod(card.sm, 10)
                assert refusal(head_dim, q_dtype, kv_dtype, 16, capability) is None
                types: dict[str, Any] = {"q_data_type": q_dtype, "kv_data_type": kv_dtype}
                options, _ = PrefillArguments("paged", 1, 1, head_dim, 16, **types).checked()
                for is_known in (True, False):
                    choose.choose_for_card(Problem(options, choose.MANY_ROWS, is_known), card, spec)
