"""Where the time of an engine's steps goes: kernels by name, and the host's time of plans and steps."""

from __future__ import annotations

import gc
import math
import re
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch

_STEPS = 24  # that only decode
# Kernels of attention: their own planning and merges too, but no cache write, and nothing else of these libraries.
_ATTENTION = re.compile(r"flash|(Prefill|Decode)With\w*KVCache|MergeStates|mha|mla", re.IGNORECASE)
# Of vLLM, of SGLang and of this repository's engine.
_PLANS = (".build", "init_forward_metadata", "init_forward_metadata_replay_cuda_graph")
_WHOLE = (".execute_model", "run_batch", "Engine.step")
_PRODUCTS = re.compile(r"gemm|gemv|nvjet|cutlass|xmma|splitK", re.IGNORECASE)  # of matrices
_OTHER = re.compile("_and_cache|append|write|sampling|norm|rope", re.IGNORECASE)


class Span(NamedTuple):
    """The time of a kernel or of a call of a Python function, in microseconds."""

    name: str
    start: float
    end: float

    @staticmethod
    def of(event: Any) -> Span:
        """Of an event of torch's profiler."""
        return Span(event.name, event.time_range.start, event.time_range.end)


def profiled(llm: Any, prompts: list[list[int]], params: Any) -> dict[str, Any]:
    """Kernels of the steps with prompts, and of some that only decode, with the host's time of plans and steps; of an
    engine in this process alone."""
    times: dict[str, list[float]] = {}
    calls = _calls()
    for owner, name in calls:
        note_time(owner, name, times)
    engine, started, steps, found = llm.llm_engine, set[str](), 0, dict[str, Any]()
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
    profiler, with_prompts = started_profiler(), 0
    while engine.has_unfinished_requests() and steps < _STEPS:
        answers = engine.step()
        with_prompts += len(started) < len(prompts)
        steps += len(started) == len(prompts)
        started |= {answer.request_id for answer in answers if answer.outputs[0].token_ids}
        if len(started) == len(prompts) and "prompts" not in found:
            found["prompts"] = kernels_of(profiler, times) | {"steps": with_prompts}
            profiler = started_profiler()
    found["decodes"] = kernels_of(profiler, times) | {"steps": steps}
    engine.abort_request(list(map(str, range(len(prompts)))))
    while engine.has_unfinished_requests():
        engine.step()
    for owner, name in calls:
        delattr(owner, name)
    return found


def _calls() -> list[tuple[Any, str]]:
    """The objects and methods whose time is noted."""
    from vllm.v1.attention.backend import AttentionMetadataBuilder

    gc.unfreeze()  # vLLM freezes what it has made, which get_objects then leaves out
    # Some types of C++ have a descriptor in place of a module's name.
    found = [one for one in gc.get_objects() if str(type(one).__module__).startswith(("vllm", "flashpage"))]
    calls = [(one, "build") for one in found if issubclass(type(one), AttentionMetadataBuilder)]
    return calls + [(one, "execute_model") for one in found if type(one).__name__ == "GPUModelRunner"]


def started_profiler() -> Any:
    torch.cuda.synchronize()
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    profiler.start()
    return profiler


def note_time(owner: Any, name: str, times: dict[str, list[float]]) -> None:
    """Notes the seconds of each call of a method."""
    call, key = getattr(owner, name), f"{type(owner).__name__}.{name}"

    def timed(*args: Any, **given: Any) -> Any:
        began = time.perf_counter()
        found = call(*args, **given)
        times.setdefault(key, []).append(time.perf_counter() - began)
        return found

    setattr(owner, name, timed)


def kernels_of(profiler: Any, times: dict[str, list[float]]) -> dict[str, Any]:
    """Ends a profile: the time of its kernels by their names, and the host's times since the last one."""
    torch.cuda.synchronize()
    profiler.stop()
    events = [Span.of(one) for one in profiler.events() if one.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda one: one.start)
    host = {key: [len(seconds), round(statistics.median(seconds) * 1e6, 1)] for key, seconds in times.items()}
    times.clear()
    return {"span_us": span_of(events), "host_us": host, **sums_of(events)}


def span_of(events: list[Span]) -> float:
    """From the first start to the last end, 0 without events; `events` are in order of their starts."""
    return max(one.end for one in events) - events[0].start if events else 0.0


def sums_of(kernels: list[Span]) -> dict[str, Any]:
    """The time of all kernels, of those of attention, and of each name; `kernels` are in order of their starts."""
    counts, spent = Counter[str](), Counter[str]()
    for one in kernels:
        counts[one.name] += 1
        spent[one.name] += one.end - one.start
    return {
        "busy_us": covered(kernels),
        "attention_us": covered([one for one in kernels if is_attention(one.name)]),
        "kernels": [[name, counts[name], round(us, 1)] for name, us in spent.most_common(40)],
    }


def is_attention(kernel: str) -> bool:
    return bool(_ATTENTION.search(kernel)) and not _OTHER.search(kernel)


def is_product(kernel: str) -> bool:
    return bool(_PRODUCTS.search(kernel)) and not is_attention(kernel)


def covered(events: list[Span]) -> float:
    """The time in which at least one of these kernels ran; `events` are in order of their starts."""
    covered, until = 0.0, -math.inf
    for one in events:
        covered += max(0.0, one.end - max(until, one.start))
        until = max(until, one.end)
    return covered


def show_profile(name: str, phases: dict[str, Any], path: Path) -> None:
    lines = []
    for phase, found in phases.items():
        lines.append(f"{name}, {phase}: span {found['span_us']:,.0f} us, busy {found['busy_us']:,.0f} us")
        lines += [
            f"  host {key}: {count} calls, {us} us in the median" for key, (count, us) in found["host_us"].items()
        ]
        lines += [
            f"  {us:12,.1f} us {count:6d} {us / count:8.1f} each  {kernel}" for kernel, count, us in found["kernels"]
        ]
    with path.open("a") as file:
        file.write("\n".join(lines) + "\n")


def of_a_step(phase: dict[str, Any]) -> dict[str, float]:
    """Microseconds of a step of a phase: all of it, kernels of attention, what the host takes to plan, and the host's
    part of a step in the median."""
    host, steps = phase["host_us"], phase["steps"]
    plans = sum(count * us for key, (count, us) in host.items() if key.endswith(_PLANS))
    whole = [us for key, (_, us) in host.items() if key.endswith(_WHOLE)]
    return {
        "step_us": round(phase["span_us"] / steps, 1),
        "attention_us": round(phase["attention_us"] / steps, 1),
        "plan_us": round(plans / steps, 1),
        "host_step_us": whole[0] if whole else 0.0,
    }
