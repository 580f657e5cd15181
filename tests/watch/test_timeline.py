"""Timelines: stamps of the CTAs of the CPU next to the plan, as a Chrome trace, a picture, and FlashInfer's events."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import one_request
import pytest
import torch

import flashpage
from flashpage.cli import main
from flashpage.errors import PlanError, RunError
from flashpage.run.stamps import NAMES, StampedRun
from flashpage.timeline import Timeline
from flashpage.watch.timeline import PHASES, phases_of

STAMPS_HEADER = Path(__file__).parents[2] / "include" / "flashpage" / "params" / "stamp.h"
Q = torch.randn(200, 4, 64)


def test_names_are_those_of_the_header() -> None:
    body = re.search(r"enum class Stamp \{(.*?)\};", STAMPS_HEADER.read_text(), re.DOTALL)
    assert body is not None
    assert tuple(re.findall(r"^\s*(\w+),", body[1], re.MULTILINE)) == (*NAMES, "count")


def check_format(text: str) -> None:
    """Holds a trace to the Trace Event Format's complete and metadata events, and to what Perfetto draws: thread
    numbers from 1 on, a name for each thread, and no two slices of a thread that overlap once times are whole
    nanoseconds."""

    def refuse(number: str) -> None:
        raise AssertionError(f"{number} is no JSON")

    trace = json.loads(text, parse_constant=refuse)
    assert set(trace) == {"traceEvents"}, "some versions read times in a displayTimeUnit"
    named: set[tuple[int, int | None]] = set()
    slices: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str) and isinstance(event["pid"], int) and event["pid"] > 0
        if event["ph"] == "M":
            assert set(event) - {"tid"} == {"name", "ph", "pid", "args"}, "a time stamp moves names away"
            kind = {"process_name": "name", "thread_name": "name", "process_sort_index": "sort_index"}[event["name"]]
            assert list(event["args"]) == [kind] and isinstance(event["args"][kind], int if "sort" in kind else str)
            named.add((event["pid"], event.get("tid")))
            continue
        assert event["ph"] == "X" and set(event) == {"name", "ph", "ts", "dur", "pid", "tid", "args"}
        assert isinstance(event["tid"], int) and event["tid"] > 0 and event["ts"] >= 0 and event["dur"] >= 0
        begin = int(event["ts"] * 1000)
        slices.setdefault((event["pid"], event["tid"]), []).append((begin, begin + int(event["dur"] * 1000)))
    assert slices and set(slices) <= named and {(process, None) for process, _ in slices} <= named
    for thread, found in slices.items():
        found.sort()
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(found)), thread


def test_a_timeline_of_runs(tmp_path: Path) -> None:
    wrapper = one_request.prefill()
    one_request.plan(wrapper, tokens=3000, rows=200)
    plain = wrapper.run(Q, one_request.KV)
    with Timeline(wrapper) as timeline:
        torch.testing.assert_close(wrapper.run(Q, one_request.KV), plain)
        out = torch.empty_like(Q)
        wrapper.run(Q, one_request.KV, out=out)
        one_request.plan(wrapper, tokens=1000, rows=8)  # another plan, and other CTAs
        wrapper.run(one_request.Q, one_request.KV)
    torch.testing.assert_close(out, plain)  # kernels with and without stamps may round differently
    assert len(timeline.runs) == 3
    one_request.plan(wrapper, tokens=3000, rows=200)
    assert torch.equal(wrapper.run(Q, one_request.KV), plain) and len(timeline.runs) == 3
    assert wrapper._attention._local.bound.params.trace is None, "later runs have the kernel without stamps"

    steps, plan = timeline.steps(0), timeline.runs[0].plan
    assert len(steps) == plan.num_ctas and set(steps["plan_cta"]) == set(range(plan.num_ctas))
    busy = steps[plan.cta_loads() > 0]
    assert len(busy) and (busy["sm"] >= 0).all()
    for before, after in itertools.pairwise(NAMES[:-1]):
        assert (busy[before] <= busy[after]).all(), (before, after)
    assert min(busy["start"]) >= 0.0 and (busy["last_tile"] - busy["first_tile"] > 1.0).all(), "microseconds of work"
    assert timeline.runs[2].plan is not plan
    assert re.search(
        r"cpu_attention: \d+ of \d+ CTAs with work\n.*\npredicted .* us .* measured", timeline.explain(), re.DOTALL
    )

    timeline.to_json(tmp_path / "run.json")
    events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    named = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {"run 0, measured: cpu_attention", "run 2, predicted"} <= named
    pieces = [event for event in events if event["ph"] == "X" and event["pid"] == 2]
    assert len(pieces) == len(plan.work_items()) and all(event["name"] == "request 0" for event in pieces)
    check_format((tmp_path / "run.json").read_text())
    computed = [event for event in events if event["pid"] == 1 and event.get("name") == "compute"]
    assert len(computed) == len(busy) and all(event["dur"] > 0 for event in computed)
    timeline.to_svg(tmp_path / "run.svg", run=0)
    drawn = (tmp_path / "run.svg").read_text()
    assert drawn.count("<title>compute</title>") == len(busy) and "<title>request 0</title>" in drawn
    with pytest.raises(PlanError, match="run=7 but 3 runs were recorded"):
        timeline.steps(7)


def test_recordings_are_one_at_a_time() -> None:
    wrapper = one_request.prefill()
    with Timeline(wrapper), pytest.raises(RunError, match="is being recorded"), Timeline(wrapper):
        pass
    with pytest.raises(PlanError, match="MultiLevelCascadeAttentionWrapper has no plan of its own"):
        Timeline(flashpage.MultiLevelCascadeAttentionWrapper(2, one_request.workspace(1 << 20)))


def test_phases_join_over_stamps_that_a_kernel_lacks() -> None:
    row = dict.fromkeys(NAMES, float("nan")) | {"start": 0.0, "first_tile": 3.0, "written": 9.0, "end": 9.5}
    found = [(phase.name, begin, end) for phase, begin, end in phases_of(row)]
    assert found == [("load", 0.0, 3.0), ("write", 3.0, 9.0), ("merge", 9.0, 9.5)]
    assert [phase.begin for phase in PHASES[1:]] == [phase.end for phase in PHASES[:-1]]


def test_steps_are_exact_nanoseconds_of_a_clock_that_counts_from_1970() -> None:
    stamps = torch.zeros(3, 8, dtype=torch.int64)
    stamps[:2] = 1_790_000_000_000_000_001 + torch.arange(8)
    stamps[1, 2] = 0
    steps = StampedRun(None, ("decode_sm90",), (stamps,), (1,)).steps()
    assert steps[0].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert np.isnan(steps[1]).tolist() == [False, False, True, False, False, False, False] and np.isnan(steps[2]).all()
    assert np.isnan(StampedRun(None, (), (torch.zeros(2, 8, dtype=torch.int64),), (1,)).steps()).all()


def test_clusters_and_parts_have_their_ctas_in_the_plan() -> None:
    run = StampedRun(None, ("decode_sm90", "prefill_sm90"), (torch.ones(3, 8), torch.ones(4, 8)), (1, 2))
    assert run.plan_ctas().tolist() == [0, 1, 2, 3, 3, 4, 4]


def decoded(buffer: torch.Tensor) -> tuple[tuple[int, int], list[tuple[int, int, int, int, int]]]:
    """(blocks, groups), and each event's (block, event, kind, SM, time), as flashinfer.profiler reads them."""
    numbers = buffer.view(torch.int64).numpy().view(np.uint64)
    found = []
    for element in map(int, numbers[1:]):
        if element:
            tag = element & 0xFFFFFFFF
            found.append((tag >> 12 & 0xFFF, tag >> 2 & 0x3FF, tag & 3, tag >> 24, element >> 32))
    return (int(numbers[0]) & 0xFFFFFFFF, int(numbers[0]) >> 32), found


def test_profiler_buffers_of_flashinfer() -> None:
    wrapper = flashpage.BatchAttention(device="cpu")
    ints = one_request.ints
    lengths = (ints(0, 4), ints(0, 40), torch.arange(40).int(), ints(640))
    options: dict[str, Any] = {"causal": True, "q_data_type": torch.float32, "kv_data_type": torch.float32}
    wrapper.plan(*lengths, 4, 4, 64, 64, 16, **options, use_profiler=True)
    q, buffer = one_request.Q[:4], torch.zeros(4096, dtype=torch.uint64)
    out, _ = wrapper.run(q, one_request.KV, profiler_buffer=buffer)
    (blocks, groups), events = decoded(buffer)
    assert groups == 1 and blocks == wrapper._attention.last_plan.num_ctas and events
    for begin, end in zip(events[::2], events[1::2], strict=True):
        assert begin[:2] == end[:2] and (begin[2], end[2]) == (0, 1) and begin[1] in (0, 2) and begin[0] < blocks
        assert (end[4] - begin[4]) % 2**32 < 10**9
    with pytest.raises(RunError, match="profiler_buffer has 2 elements but this run has"):
        wrapper.run(q, one_request.KV, profiler_buffer=torch.zeros(2, dtype=torch.uint64))
    with pytest.raises(RunError, match="profiler_buffer has shape .*float32: pass contiguous uint64"):
        wrapper.run(q, one_request.KV, profiler_buffer=torch.zeros(2))
    wrapper.plan(*lengths, 4, 4, 64, 64, 16, **options)
    torch.testing.assert_close(wrapper.run(q, one_request.KV)[0], out)  # from a kernel without stamps


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    batch = ["300,20", "--q-lens", "70,1", "--heads", "4", "--head-dim", "64", "--backend", "cpu"]
    assert main(["trace", *batch, "--json", str(tmp_path / "run.json"), "--svg", str(tmp_path / "run.svg")]) == 0
    out = capsys.readouterr().out
    assert "cpu_attention: " in out and "predicted" in out and "Chrome trace: " in out
    check_format((tmp_path / "run.json").read_text())
    assert main(["trace", "300", "--page-size", "0"]) == 2


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("batch", "kernel"),
    [
        (["16x4000"], "decode_sm90"),
        (["zipf:64:1024", "--heads", "64/8"], "decode_sm90"),
        (["4x2048", "--q-lens", "4x2048"], "prefill_sm90"),
    ],
)
def test_a_timeline_on_a_card(
    batch: list[str], kernel: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each CTA with work has its phases in order, and none is longer than the run."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the kernels with stamps are those of Hopper")
    file = tmp_path / "run.json"
    assert main(["trace", *batch, "--backend", "cuda", "--repeats", "2", "--json", str(file)]) == 0
    assert capsys.readouterr().out.startswith(kernel)
    check_format(file.read_text())
    events = [event for event in json.loads(file.read_text())["traceEvents"] if event["ph"] == "X"]
    measured = [event for event in events if event["pid"] % 10 == 1]
    ctas = {event["tid"] for event in events if event["pid"] % 10 == 2}
    for phase in ("compute", "write"):  # a card's timer has steps of a microsecond, in which a load can begin and end
        assert len({event["tid"] for event in measured if event["name"] == phase}) >= 0.9 * len(ctas), phase
    assert any(event["name"] == "load" for event in measured)
    assert 1.0 < max(event["ts"] + event["dur"] for event in measured) < 5000.0, "microseconds"
    assert all(event["dur"] >= 0 for event in measured)


@pytest.mark.cuda
def test_profiler_buffers_on_a_card() -> None:
    """Mixed batches are two parts, whose CTAs are numbered one after the other."""
    wrapper = flashpage.BatchAttention(device="cuda")
    q_lens, kv_lens = [1] * 30 + [600], [2000] * 30 + [600]
    q_indptr, pages = torch.tensor([0, *q_lens]).cumsum(0).int(), torch.tensor([0, *kv_lens]).add(15).div(16).long()
    indptr = pages.cumsum(0).int()
    indices, lens = torch.arange(int(indptr[-1])).int(), torch.tensor(kv_lens).int()
    wrapper.plan(q_indptr, indptr, indices, lens, 32, 8, 128, 128, 16, causal=True, use_profiler=True)
    q = torch.randn(int(q_indptr[-1]), 32, 128, dtype=torch.bfloat16, device="cuda")
    cache = torch.randn(len(indices), 2, 16, 8, 128, dtype=torch.bfloat16, device="cuda")
    buffer = torch.zeros(1 << 14, dtype=torch.uint64, device="cuda")
    out, _ = wrapper.run(q, cache, profiler_buffer=buffer)
    (blocks, groups), events = decoded(buffer.cpu())
    assert (
        groups == 1
        and len({event[0] for event in events}) > 0.5 * blocks
        and {event[1] for event in events} <= {0, 1, 2}
    )
    wrapper.plan(q_indptr, indptr, indices, lens, 32, 8, 128, 128, 16, causal=True)
    assert torch.equal(wrapper.run(q, cache)[0], out)
