"""Mixed batches in two launches at the same time, on a card: compared with one plan of the same batch, in chains of
launches, on other streams, and in graphs."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from graphs import capture

import flashpage
from flashpage.plan import mixed_batch
from flashpage.plan.report.mixed import PartedPlan

pytestmark = pytest.mark.cuda
DEVICE = "cuda:0"
ROWS = (1, 700, 1, 16, 0, 17, 1, 1, 40, *[1] * 30)
KV_LENS = (900, 700, 9000, 16, 40, 3000, 0, 1, 2500, *(100 + 211 * i for i in range(30)))
LAYERS = 24


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.get_device_capability(DEVICE) != (9, 0):
        pytest.skip("both kernels are Hopper's")
    monkeypatch.setattr(mixed_batch, "LEAST_GAIN_NS", -1e12)


def indptr(lens: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *lens]).cumsum(0).int()


class Mixed:
    """A batch for the paged wrapper, or for the ragged one (a page_size of 0)."""

    def __init__(
        self,
        *,
        heads: tuple[int, int] = (32, 8),
        dim: int = 128,
        page_size: int = 16,
        kv_dtype: torch.dtype = torch.bfloat16,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.heads, self.dim, self.page = heads, dim, page_size
        self.options = {"causal": True, "q_data_type": torch.bfloat16, "kv_data_type": kv_dtype} | options
        self.q = torch.randn(sum(ROWS), heads[0], dim, device=DEVICE, dtype=torch.bfloat16)
        if page_size:
            counts = tuple(-(-n // page_size) for n in KV_LENS)
            last = torch.tensor([(n - 1) % page_size + 1 if n else 0 for n in KV_LENS]).int()
            indices = torch.randperm(sum(counts)).int().to(DEVICE)
            self.lengths: tuple[torch.Tensor, ...] = (indptr(counts), indices, last)
            shapes = [(sum(counts), 2, page_size, heads[1], dim)]
        else:
            self.lengths, shapes = (indptr(KV_LENS),), [(sum(KV_LENS), heads[1], dim)] * 2
        self.kv = [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16).to(kv_dtype) for shape in shapes]
        kind = flashpage.BatchPrefillWithPagedKVCacheWrapper if page_size else None
        workspace = torch.full((128 << 20,), 255, dtype=torch.uint8, device=DEVICE)
        self.wrapper: Any = (kind or flashpage.BatchPrefillWithRaggedKVCacheWrapper)(workspace)
        self.plan()

    def plan(self) -> None:
        heads = (*self.heads, self.dim, *([self.page] if self.page else []))
        self.wrapper.plan(indptr(ROWS), *self.lengths, *heads, **self.options)

    def outputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        lse = torch.full(self.q.shape[:2], math.nan, device=DEVICE)
        return torch.full_like(self.q, math.nan), lse

    def run(self, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = self.outputs()
        found: tuple[torch.Tensor, torch.Tensor] = self.wrapper.run(
            self.q, *self.kv, out=out, lse=lse, return_lse=True, **options
        )
        return found


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"page_size": 1},
        {"page_size": 0},
        {"heads": (8, 1)},
        {"heads": (32, 32)},
        {"heads": (15, 5)},
        {"dim": 64},
        {"dim": 256, "heads": (16, 8)},
        {"kv_dtype": torch.float8_e4m3fn},
        {"causal": False},
        {"window_left": 300},
        {"logits_soft_cap": 20.0},
        {"pos_encoding_mode": "ALIBI"},
    ],
    ids=str,
)
def test_two_launches_give_what_one_gives(how: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    mixed = Mixed(**how)
    plan = mixed.wrapper.last_plan
    assert isinstance(plan, PartedPlan) and mixed.wrapper.resolved_backend == "decode_sm90 + prefill_sm90"
    sinks = torch.linspace(-1.0, 1.0, mixed.heads[0], device=DEVICE)
    found = mixed.run(), mixed.run(sinks=sinks), mixed.run(enable_pdl=False)
    assert_all_same_bits(found[0], mixed.run())
    assert_all_same_bits(found[0], found[2])
    monkeypatch.setattr(mixed_batch, "LEAST_GAIN_NS", 1e12)
    mixed.wrapper.reset_workspace_buffer(mixed.wrapper._float_workspace_buffer, mixed.wrapper._int_workspace_buffer)
    mixed.plan()
    assert not isinstance(mixed.wrapper.last_plan, PartedPlan)
    for (out, lse), (out_of_one, lse_of_one) in zip(found, (mixed.run(), mixed.run(sinks=sinks)), strict=False):
        torch.testing.assert_close(out, out_of_one, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(lse, lse_of_one, rtol=1e-3, atol=2e-3)


def assert_all_same_bits(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    """Compares outputs, and checks that all rows are written."""
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("enable_pdl", [None, False])
def test_layers_that_follow_at_once_read_what_both_launches_wrote(enable_pdl: bool | None) -> None:
    """Each layer's output is the next one's query: a launch that starts too early reads NaN or an older step."""
    mixed = Mixed()

    def layers(wait: bool) -> list[torch.Tensor]:
        steps = [mixed.q] + [mixed.outputs()[0] for _ in range(LAYERS)]
        torch.cuda.synchronize()
        for before, after in itertools.pairwise(steps):
            mixed.wrapper.run(before, *mixed.kv, out=after, enable_pdl=enable_pdl)
            if wait:
                torch.cuda.synchronize()
        torch.cuda.synchronize()
        return steps

    expected = layers(wait=True)
    for _ in range(4):
        assert_all_same_bits(tuple(layers(wait=False)), tuple(expected))


def test_plans_and_appends_between_runs() -> None:
    """The plan is copied and keys are written directly before the launches that read them, and directly after."""
    mixed = Mixed()
    expected = mixed.run()
    cache, kept = mixed.kv[0], mixed.kv[0].clone()
    for _ in range(20):
        cache.fill_(math.nan)
        cache.copy_(kept)
        mixed.plan()
        found = mixed.run()
        cache.fill_(math.nan)
        assert_all_same_bits(found, expected)


@pytest.mark.parametrize("enable_pdl", [None, False])
def test_captured_layers(enable_pdl: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forks and joins in one graph, with runs of one plan between them; eager runs between replays."""
    mixed = Mixed()
    monkeypatch.setattr(mixed_batch, "LEAST_GAIN_NS", 1e12)
    whole = Mixed()
    assert not isinstance(whole.wrapper.last_plan, PartedPlan)
    steps = [mixed.q] + [mixed.outputs()[0] for _ in range(5)]

    def layers() -> None:
        for i, layer in enumerate((mixed, whole, mixed, mixed, whole)):
            layer.wrapper.run(steps[i], *layer.kv, out=steps[i + 1], enable_pdl=enable_pdl)

    layers()
    torch.cuda.synchronize()
    expected = tuple(step.clone() for step in steps)
    replay = capture(layers)
    for _ in range(3):
        for step in steps[1:]:
            step.fill_(math.nan)
        replay()
        assert_all_same_bits(tuple(steps), expected)
        assert_all_same_bits(mixed.run()[:1], expected[1:2])


def test_runs_on_one_stream_after_another() -> None:
    """The side stream belongs to the wrapper; the stream that it joins may differ in every run."""
    mixed = Mixed()
    expected = mixed.run()
    streams = [torch.cuda.Stream(DEVICE) for _ in range(3)]
    torch.cuda.synchronize()
    found = []
    for stream in streams * 4:
        with torch.cuda.stream(stream):
            found.append(mixed.run())
        stream.synchronize()
    for outputs in found:
        assert_all_same_bits(outputs, expected)


def test_both_launches_execute_at_the_same_time() -> None:
    """The purpose of the two streams."""
    mixed = Mixed()
    mixed.run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(5):
            mixed.run()
        torch.cuda.synchronize()
    spans: dict[str, list[tuple[float, float]]] = {"decode_sm90": [], "prefill_sm90": []}
    for event in profile.events():
        for kernel, of_kernel in spans.items():
            if kernel in event.name:
                of_kernel.append((event.time_range.start, event.time_range.end))
    if not any(spans.values()):
        pytest.skip("torch's profiler sees no kernels here")
    assert len(spans["decode_sm90"]) == len(spans["prefill_sm90"]) == 5
    pairs = zip(*(sorted(found) for found in spans.values()), strict=True)
    assert all(max(a[0], b[0]) < min(a[1], b[1]) for a, b in pairs)


def test_a_captured_run() -> None:
    mixed = Mixed()
    expected, (out, lse) = mixed.run(), mixed.outputs()
    replay = capture(lambda: mixed.wrapper.run(mixed.q, *mixed.kv, out=out, lse=lse, return_lse=True))
    for _ in range(3):
        out.fill_(math.nan)
        lse.fill_(math.nan)
        replay()
        torch.cuda.synchronize()
        assert_all_same_bits((out, lse), expected)
