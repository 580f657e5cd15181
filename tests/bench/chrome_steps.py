"""Steps of an engine from a trace that torch's profiler wrote as a file (Chrome's format), in the form of
step_profile.py: for engines whose steps run in a process of their own, and that profile themselves."""

from __future__ import annotations

import gzip
import json
import statistics
from pathlib import Path
from typing import Any

from step_profile import Span, span_of, sums_of


def phase_of(path: Path, step: str, plan: str) -> dict[str, Any]:
    """A phase's kernels, and the host's time of steps and plans.

    Args:
        step, plan: names of the Python functions that run a step and that plan for attention; calls of functions whose
            names begin with `plan` count if no such call is around them.
    """
    with gzip.open(path, "rt") as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    kernels = _spans(events, ("kernel", "gpu_memcpy", "gpu_memset"))
    functions = [span._replace(name=_function(span.name)) for span in _spans(events, ("python_function",))]
    # SGLang ends the profile in the call after the last step.
    steps = [span for span in functions if span.name == step][:-1]
    if not steps:
        raise SystemExit(f"{path.name} has no two calls of {step}: the profile needs Python's functions (with_stack).")
    plans = _outermost([span for span in functions if span.name.startswith(plan)])
    host = {name: _calls(calls) for name, calls in ((step, steps), (plan, plans)) if calls}
    return {"span_us": span_of(kernels or steps), "host_us": host, "steps": len(steps), **sums_of(kernels)}


def _spans(events: list[dict[str, Any]], categories: tuple[str, ...]) -> list[Span]:
    """The events of these categories, in order of their starts."""
    found = [event for event in events if event.get("cat") in categories]
    return sorted((Span(one["name"], one["ts"], one["ts"] + one["dur"]) for one in found), key=lambda span: span.start)


def _function(name: str) -> str:
    """`run_batch` of `sglang/srt/managers/scheduler.py(2911): run_batch`."""
    return name.rpartition(": ")[2]


def _outermost(spans: list[Span]) -> list[Span]:
    """Those that lie in no other one; `spans` are in order of their starts."""
    found: list[Span] = []
    for span in spans:
        if not found or span.start >= found[-1].end:
            found.append(span)
    return found


def _calls(spans: list[Span]) -> list[Any]:
    return [len(spans), round(statistics.median(span.end - span.start for span in spans), 1)]
