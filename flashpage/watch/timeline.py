"""The measured timeline of runs next to what their plans predicted: as numbers, as a Chrome trace, and as a picture."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from ..base.errors import PlanError
from ..plan.report.picture import tone
from ..run.stamps import NAMES, Recorder, StampedRun
from ..wrappers.base import Attention

_MEASURED, _PREDICTED = 1, 2  # processes of a Chrome trace
_ITEM_FIELDS = ("kv_head", "num_units", "first_packed_row", "kv_begin", "kv_end")
_FIRST_THREAD = 1  # some versions of Perfetto show the threads 0 and 1 of a process as one


class Phase(NamedTuple):
    """What a CTA does between two stamps; a stamp that a kernel lacks joins a phase to the one before it."""

    name: str
    begin: str
    end: str
    color: str


PHASES = (
    Phase("start", "start", "first_load", "#8a94a0"),
    Phase("load", "first_load", "first_tile", "#e0a030"),
    Phase("compute", "first_tile", "last_tile", "#3a7bd5"),
    Phase("write", "last_tile", "written", "#38a169"),
    Phase("merge", "written", "end", "#b04a8f"),
)


_STYLE = """.back { fill: #fff; } text { fill: #1f2933; } .soft { fill: #56616b; }
@media (prefers-color-scheme: dark) { .back { fill: #15181c; } text { fill: #e4e7eb; } .soft { fill: #a9b4bf; } }"""


class Timeline:
    """Records the runs of a wrapper within a `with` block: when each CTA started, had its first tile, used its last
    one, wrote its rows and ended, on the card's own clock.

    Runs of this thread alone are recorded. Kernels with stamps are compiled when they are first needed. The wrapper
    must have one plan at a time (decode, prefill, ragged, BatchAttention, latent rows); cascades have several.

    ```python
    with Timeline(wrapper) as timeline:
        wrapper.run(q, kv_cache)
    timeline.to_json("run.json")  # opens in Perfetto
    ```
    """

    def __init__(self, wrapper: Any) -> None:
        attention = wrapper if isinstance(wrapper, Attention) else getattr(wrapper, "_attention", None)
        if not isinstance(attention, Attention):
            raise PlanError(f"{type(wrapper).__name__} has no plan of its own: pass a decode, prefill or MLA wrapper.")
        self._attention = attention
        self._recorder = Recorder()
        self._entered = contextlib.ExitStack()

    def __enter__(self) -> Timeline:
        self._recorder = self._entered.enter_context(self._attention.recorded())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered.close()

    @property
    def runs(self) -> list[StampedRun]:
        """The recorded runs, in order."""
        return self._recorder.runs

    def steps(self, run: int = -1) -> np.ndarray:
        """Microseconds after the first CTA's start, a structured array with a row for each CTA: `cta`, `plan_cta`, `sm`
        (or core) and the stamps of `flashpage.run.stamps.NAMES`; NaN where a CTA has no such stamp."""
        found = self._run(run)
        times, places, ctas = found.steps() / 1e3, found.places(), found.plan_ctas()
        fields = [("cta", np.int32), ("plan_cta", np.int32), ("sm", np.int32)]
        out = np.empty(len(ctas), np.dtype(fields + [(name, np.float64) for name in NAMES[:-1]]))
        out["cta"], out["plan_cta"], out["sm"] = np.arange(len(ctas)), ctas, places
        for i, name in enumerate(NAMES[:-1]):
            out[name] = times[:, i]
        return out

    def explain(self, run: int = -1) -> str:
        """The times of each stamp over the CTAs with work, and the end next to the prediction."""
        found, steps = self._run(run), self.steps(run)
        busy = steps[np.isfinite(steps["first_tile"])]
        if not len(busy):
            return f"{' + '.join(found.kernels)} has no stamps, or the run had no work"
        loads = found.plan.cta_loads() / 1e3
        lines = [
            f"{' + '.join(found.kernels)}: {len(busy)} of {len(steps)} CTAs with work",
            "stamp        min   mean    max us",
        ]
        for name in NAMES[:-1]:
            times = busy[name][np.isfinite(busy[name])]
            if len(times):
                lines.append(f"{name:10s} {times.min():6.2f} {times.mean():6.2f} {times.max():6.2f}")
        first, last = float(busy["end"].min()), float(busy["end"].max())
        lines.append(f"ends spread over {(last - first) / last:.1%} of the time")
        lines.append(
            f"predicted {loads.max():.2f} us for the longest CTA, measured {last:.2f} us with launch and merge"
        )
        return "\n".join(lines)

    def to_json(self, path: str | Path) -> None:
        """Writes all runs as a Chrome trace, which Perfetto opens: a process for what was measured and one for what the
        plan predicted, a thread for each CTA."""
        events: list[dict[str, Any]] = []
        for i in range(len(self.runs)):
            events += self._events(i)
        Path(path).write_text(json.dumps({"traceEvents": events}))

    def to_svg(self, path: str | Path, run: int = -1) -> None:
        """Draws one run: the phases of each CTA, and below each one a line with the pieces of its plan."""
        Path(path).write_text(self._svg(run))

    def _run(self, run: int) -> StampedRun:
        try:
            return self.runs[run]
        except IndexError:
            raise PlanError(
                f"run={run} but {len(self.runs)} runs were recorded: run the wrapper in the block."
            ) from None

    def _events(self, run: int) -> list[dict[str, Any]]:
        found, steps, first = self._run(run), self.steps(run), 10 * run
        measured, predicted = first + _MEASURED, first + _PREDICTED
        kernels = " + ".join(found.kernels)
        events = [*_process(measured, f"run {run}, measured: {kernels}"), *_process(predicted, f"run {run}, predicted")]
        events += [_thread(measured, cta) for cta in steps["cta"].tolist()]
        events += [_thread(predicted, cta) for cta in range(found.plan.num_ctas)]
        for row in steps:
            cta, args = int(row["cta"]), {"sm": int(row["sm"]), "plan_cta": int(row["plan_cta"])}
            for phase, begin, end in phases_of(row):
                events.append(_slice(measured, cta, phase.name, begin, end, args))
        for segment, item in zip(found.plan.segments(), found.plan.work_items(), strict=True):
            args = {name: int(item[name]) for name in _ITEM_FIELDS} | {"is_piece": segment.is_piece}
            begin, end = segment.start / 1e3, segment.end / 1e3
            events.append(_slice(predicted, segment.cta, f"request {segment.request}", begin, end, args))
        return events

    def _svg(self, run: int) -> str:
        found, steps = self._run(run), self.steps(run)
        height, left, top = max(4, min(14, 1400 // max(1, len(steps)))), 46, 40
        segments: dict[int, list[Any]] = {}
        for segment in found.plan.segments():
            segments.setdefault(segment.cta, []).append(segment)
        ends = steps["end"][np.isfinite(steps["end"])]
        longest = max(float(ends.max(initial=1e-3)), float(found.plan.cta_loads().max(initial=0.0)) / 1e3)
        scale, total = (1000 - left - 4) / longest, top + len(steps) * height
        measured = f"{' + '.join(found.kernels)}: {len(steps)} CTAs, {ends.max(initial=0.0):.4g} us measured"
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1000 {total + 22}" font-family="sans-serif" '
            f'font-size="11"><style>{_STYLE}</style><rect width="1000" height="{total + 22}" class="back"/>',
            f'<text x="{left}" y="14">{measured}; the line below each CTA: its plan, one colour a request</text>',
        ]
        for i, phase in enumerate(PHASES):
            x = left + 90 * i
            lines.append(f'<rect x="{x}" y="22" width="10" height="10" fill="{phase.color}"/>')
            lines.append(f'<text x="{x + 14}" y="31">{phase.name}</text>')
        for row in steps:
            y = top + int(row["cta"]) * height
            for phase, begin, end in phases_of(row):
                lines.append(
                    _bar(left + begin * scale, y, (end - begin) * scale, height * 0.6, phase.color, phase.name)
                )
            for s in segments.get(int(row["plan_cta"]), ()):
                x, width = left + s.start / 1e3 * scale, (s.end - s.start) / 1e3 * scale
                lines.append(_bar(x, y + height * 0.68, width, height * 0.2, tone(s.request), f"request {s.request}"))
        for cta in range(0, len(steps), max(1, -(-14 // height))):
            middle = top + (cta + 0.5) * height + 4
            lines.append(f'<text x="{left - 6}" y="{middle:.0f}" text-anchor="end" class="soft">{cta}</text>')
        lines.append(f'<text x="{left}" y="{total + 16}" class="soft">0</text>')
        lines.append(f'<text x="996" y="{total + 16}" text-anchor="end" class="soft">{longest:.4g} us</text></svg>')
        return "\n".join(lines)


def phases_of(row: Any) -> list[tuple[Phase, float, float]]:
    """The phases of a CTA with begin and end in microseconds."""
    found, at = [], float(row["start"])
    for phase in PHASES:
        end = float(row[phase.end])
        if np.isfinite(end) and np.isfinite(at):
            if end > at:
                found.append((phase, at, end))
            at = max(at, end)
    return found


def _process(process: int, name: str) -> list[dict[str, Any]]:
    """The name of a process, and its place among the others: by default, viewers sort by how much a process did."""
    return [
        {"name": "process_name", "ph": "M", "pid": process, "args": {"name": name}},
        {"name": "process_sort_index", "ph": "M", "pid": process, "args": {"sort_index": process}},
    ]


def _thread(process: int, cta: int) -> dict[str, Any]:
    thread = cta + _FIRST_THREAD
    return {"name": "thread_name", "ph": "M", "pid": process, "tid": thread, "args": {"name": f"CTA {cta}"}}


def _slice(process: int, cta: int, name: str, begin: float, end: float, args: dict[str, Any]) -> dict[str, Any]:
    """A slice from `begin` to `end`, in microseconds; of whole nanoseconds, so that neighbours do not overlap."""
    first, last = round(begin * 1e3), round(end * 1e3)
    event = {"name": name, "ph": "X", "ts": _microseconds(first), "dur": _microseconds(last - first)}
    return {**event, "pid": process, "tid": cta + _FIRST_THREAD, "args": args}


def _microseconds(nanoseconds: int) -> float:
    """A number that is at least so many nanoseconds when it is multiplied by 1000: Perfetto rounds down after that."""
    found = nanoseconds / 1e3
    return found if int(found * 1e3) == nanoseconds else float(np.nextafter(found, np.inf))


def _bar(x: float, y: float, width: float, height: float, color: str, title: str) -> str:
    return (
        f'<rect x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{height:.1f}" fill="{color}">'
        f"<title>{title}</title></rect>"
    )
