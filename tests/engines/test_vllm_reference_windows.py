"""vLLM's steps of models whose rows see their prompt and a window of the tokens after it (R-SWA), without vLLM."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_step import Form, Scene, close, run

from flashpage.engines.plugin.group_plans import GroupPlans, Use
from flashpage.engines.vllm.plugin import reference_windows
from flashpage.engines.vllm.plugin.planner import GroupPlanner
from flashpage.engines.vllm.plugin.reference_windows import ReferenceWindows

pytestmark = pytest.mark.usefixtures("quick_kernels")

WINDOW = 8
STEPS = {  # rows and tokens of each request, and the tokens of its prompt
    "decodes": ([1, 1, 1], [60, 33, 17], [20, 32, 17]),
    "a prompt in chunks, and decodes": ([1, 1, 30], [60, 33, 50], [20, 5, 90]),
    "drafts": ([4, 4, 3], [60, 33, 17], [20, 30, 15]),
}


def shown(q_lens: list[int], kv_lens: list[int], prompts: list[int]) -> list[torch.Tensor]:
    """As vLLM's kernels show them, [rows, tokens] for each request."""
    found = []
    for rows, tokens, prompt in zip(q_lens, kv_lens, prompts, strict=True):
        q, t = torch.arange(tokens - rows, tokens)[:, None], torch.arange(tokens)
        found.append((t <= q) & ((t < prompt) | (q - t < WINDOW)))
    return found


@pytest.mark.parametrize("sizes", [{}, {"graph_rows": 64, "few_rows": 4}], ids=["eager", "captured"])
@pytest.mark.parametrize("form", [Form(), Form((6, 2, 80), 24, torch.float16, kv_type="fp8", soft_cap=5.0)])
@pytest.mark.parametrize("name", STEPS)
def test_each_step(name: str, form: Form, sizes: dict[str, Any], device: str) -> None:
    """Blocks between prompt and window are freed, so their tokens may be anything, though no NaN."""
    q_lens, kv_lens, prompts = STEPS[name]
    scene = Scene(form, q_lens, kv_lens, device)
    layer, full = scene.form.layer(), scene.sizes(**sizes)
    windows = ReferenceWindows(WINDOW, full.max_requests, scene.device)
    planner = GroupPlanner(GroupPlans([layer], full, scene.device, mask=windows.variant), prompts=windows)
    given = torch.tensor(prompts, dtype=torch.int32)  # on the host, as vLLM's first model runner has them
    step = planner.plan(dataclasses.replace(scene.common(), rswa_prefix_lens=given))
    is_captured = bool(sizes) and max(q_lens) <= 4
    assert set(planner.plans._attentions) == {Use.MASKED_IN_GRAPH if is_captured else Use.MASKED}
    close(run(step, layer, scene.tensors()), scene.expected(masks=shown(q_lens, kv_lens, prompts)))
    warm = planner.plan(scene.common())  # no prompts are known
    close(run(warm, layer, scene.tensors()), scene.expected())


def test_captured_steps_read_the_prompts_where_they_are(device: str) -> None:
    windows = ReferenceWindows(WINDOW, 4, torch.device(device))
    address = windows._prompts.data_ptr()
    for given in (torch.tensor([3, 4]), None, torch.tensor([5, 6, 7, 8], dtype=torch.int32)):
        windows.take(given)
    assert windows._prompts.tolist() == [5, 6, 7, 8] and windows._prompts.data_ptr() == address


def test_what_is_refused_at_configuration() -> None:
    def config(window: int | None, ranks: int = 1, halves: bool = False) -> SimpleNamespace:
        parallel = SimpleNamespace(decode_context_parallel_size=ranks, use_ubatching=halves)
        return SimpleNamespace(model_config=SimpleNamespace(rswa_window=window), parallel_config=parallel)

    plain, slopes = Form().layer(), Form(slopes=(0.5, 0.25, 0.1, 0.05)).layer()
    for served in ((config(None, 2), plain, True), (config(None), slopes, True), (config(8), plain, False)):
        assert reference_windows.refusal(*served) is None
    for refused, word in (
        ((config(8, 2), plain, False), "context parallelism"),
        ((config(8, halves=True), plain, False), "two halves"),
        ((config(8), plain, True), "batch invariance"),
        ((config(8), slopes, False), "ALiBi"),
    ):
        assert word in (reference_windows.refusal(*refused) or "")
    assert reference_windows.refusal(config(8, 2), Form(is_encoder=True).layer(), True) is None
    assert reference_windows.window_of(SimpleNamespace(rswa_window=8)) == 8
    assert reference_windows.window_of(SimpleNamespace()) is None
