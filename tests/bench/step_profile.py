"""Where the time of an engine's steps goes: kernels by name, and the host's time of plans and steps."""

from __future__ import annotations

import gc
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch


def profiled(run: Any) -> dict[str, Any]:
    """Kernels of the later half of a run, in which all requests decode, and the host's time of plans and steps; those
    of an engine in this process alone."""
    from vllm.v1.attention.backend import AttentionMetadataBuilder

    times: dict[str, list[float]] = {}
    found = gc.get_objects()
    calls = [(one, "build") for one in found if isinstance(one, AttentionMetadataBuilder)]
    calls += [(one, "execute_model") for one in found if type(one).__name__ == "GPUModelRunner"]
    for owner, name in calls:
        _time(owner, name, times)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    for owner, name in calls:
        delattr(owner, name)
    events = [one for one in profiler.events() if one.device_type == torch.autograd.DeviceType.CUDA]
    host = {key: [len(seconds), round(statistics.median(seconds) * 1e6, 1)] for key, seconds in times.items()}
    return _kernels(events) | {"host_us": host}


def _time(owner: Any, name: str, times: dict[str, list[float]]) -> None:
    """Notes the seconds of each call of a method."""
    call, key = getattr(owner, name), f"{type(owner).__name__}.{name}"

    def timed(*args: Any, **given: Any) -> Any:
        began = time.perf_counter()
        found = call(*args, **given)
        times.setdefault(key, []).append(time.perf_counter() - began)
        return found

    setattr(owner, name, timed)


def _kernels(events: list[Any]) -> dict[str, Any]:
    """The time of the later half of a run, and of its kernels by their names."""
    events.sort(key=lambda one: one.time_range.start)
    begin, end = events[0].time_range.start, max(one.time_range.end for one in events)
    late = [one for one in events if one.time_range.start > (begin + end) / 2]
    busy, until = 0.0, 0.0
    counts: Counter[str] = Counter()
    spent: Counter[str] = Counter()
    for one in late:
        start, stop = one.time_range.start, one.time_range.end
        busy += max(0.0, stop - max(until, start))
        until = max(until, stop)
        counts[one.name] += 1
        spent[one.name] += stop - start
    return {
        "span_us": until - late[0].time_range.start,
        "busy_us": busy,
        "kernels": [[name, counts[name], round(us, 1)] for name, us in spent.most_common(40)],
    }


def show_profile(name: str, found: dict[str, Any], path: Path) -> None:
    lines = [f"{name}: span {found['span_us']:,.0f} us, busy {found['busy_us']:,.0f} us"]
    lines += [f"  host {key}: {count} calls, {us} us in the median" for key, (count, us) in found["host_us"].items()]
    lines += [f"  {us:12,.1f} us {count:6d} {us / count:8.1f} each  {name}" for name, count, us in found["kernels"]]
    with path.open("a") as file:
        file.write("\n".join(lines) + "\n")
