"""Runs a kept call again, on a card if there is one, on the CPU and by the reference, and says where they part."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from ..base.errors import SettingError
from ..wrappers.base import Attention
from . import reference
from .calls import DOORS
from .dump import Call, load, strided_copy

# The least difference that counts, as a share of a value and of 1: about four roundings of the output's type.
_TOLERANCES = {torch.float32: 1e-3, torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float8_e4m3fn: 0.25}


class UnkeptError(SettingError):
    """A call that a file does not hold whole."""


class Run(NamedTuple):
    """One run of the inner interface within a call."""

    kernel: str
    out: torch.Tensor  # on the CPU
    q_indptr: list[int]
    exact: torch.Tensor | None  # the reference's output
    why_not: str  # why there is none


class Outcome(NamedTuple):
    """A call on one device."""

    device: str
    error: str  # empty: none
    runs: list[Run]
    results: list[torch.Tensor]


def replay(folder: str | Path) -> list[str]:
    """Runs the call in a folder that FLASHPAGE_DUMP made, and returns lines that say what happened."""
    calls, reason = load(Path(folder))
    lines = [f"{calls[-1].name} was kept because: {reason}"]
    outcomes = [_outcome(calls, device) for device in (["cuda"] if torch.cuda.is_available() else []) + ["cpu"]]
    for outcome in outcomes:
        lines += _lines(outcome)
    if len(outcomes) == 2:
        lines += _between(*outcomes)
    return lines


def _outcome(calls: list[Call], device: str) -> Outcome:
    runs: list[Run] = []
    owner, result, error = None, None, ""
    with _recorded(runs):
        try:
            for call in calls:
                owner, result = _call(call, owner, device)
            if device == "cuda":
                torch.cuda.synchronize()
        except UnkeptError:
            raise
        except Exception as found:
            error = f"{type(found).__name__}: {found}"
    parts = result if isinstance(result, (tuple, list)) else [result]
    return Outcome(device, error, runs, [part.cpu() for part in parts if isinstance(part, torch.Tensor)])


def _call(call: Call, owner: Any, device: str) -> tuple[Any, Any]:
    """Makes the object, calls its method, or calls the function; returns the object and the result."""
    name, _, method = call.name.partition(".")
    positional, named = [], {}
    for key, value in call.arguments.items():
        made = _made(value, device)
        if key in ("args", "deprecated_positional_args", "lengths_and_heads") and isinstance(made, list):
            positional += made
        elif key.startswith("argument "):
            positional.append(made)
        else:
            named[key] = made
    if method:
        return owner, getattr(owner, method)(*positional, **named)
    found = _public(name)(*positional, **named)
    return (found, None) if isinstance(_public(name), type) else (None, found)


def _public(name: str) -> Any:
    for door in DOORS:
        module = importlib.import_module(f"flashpage.{door}")
        if name in module.__all__:
            return getattr(module, name)
    raise SettingError(f"{name} is no public name of this version: replay with the version that kept the call")


def _made(value: Any, device: str) -> Any:
    """A kept value on a device. Tensors of the host stay there."""
    if isinstance(value, list):
        return tuple(_made(item, device) for item in value)
    if not isinstance(value, dict):
        return value
    if "not kept" in value:
        raise UnkeptError(
            f"the file lacks an argument, a {value['not kept']}, which a file cannot hold: "
            "debug this call in the program that makes it"
        )
    if "device" in value and len(value) == 1:
        return torch.device(device)
    shape = value.get("empty")
    to = device if (shape or value)["device"] == "cuda" else "cpu"
    if shape is not None:
        return torch.zeros(shape["shape"], dtype=shape["dtype"], device=to)
    return strided_copy(value["tensor"], torch.device(to))


@contextlib.contextmanager
def _recorded(runs: list[Run]) -> Iterator[None]:
    """Notes each run of the inner interface, with the reference's output on the CPU."""
    run = Attention.run

    def recorded(self: Attention, q: Any, cache: Any, *args: Any, **kwargs: Any) -> Any:
        result = run(self, q, cache, *args, **kwargs)
        names = ("out", "lse", "return_lse", "values", "scales", "sinks", "enable_pdl")
        given = dict(zip(names, args, strict=False)) | kwargs
        values, scales = given.get("values") or self.values, given.get("scales") or (None, None, None)
        out = result[0] if isinstance(result, tuple) else result
        inputs = reference.Inputs(self.session, values, self.kv_layout, q, cache, scales, given.get("sinks"))
        why_not = reference.why_not(inputs)
        exact = None if why_not or self.device.type != "cpu" else reference.attention(inputs)
        q_indptr = self.session.batch.numbers(self.session.options.page_span)[0].tolist()
        runs.append(Run(self.resolved_backend, out.detach().cpu().clone(), q_indptr, exact, why_not))
        return result

    with mock.patch.object(Attention, "run", recorded):
        yield


def _lines(outcome: Outcome) -> list[str]:
    name = torch.cuda.get_device_name() if outcome.device == "cuda" else "CPU"
    lines = [f"{name}: {outcome.error or 'done, no error'}"]
    for i, run in enumerate(outcome.runs):
        where = f"{name}, run {i} ({run.kernel})"
        if run.exact is not None:
            lines.append(f"{where}: {difference(run.out, run.exact, run.q_indptr, 'the reference')}")
        elif run.why_not and outcome.device == "cpu":
            lines.append(f"{where}: the reference does not know {run.why_not}")
    return lines


def _between(card: Outcome, cpu: Outcome) -> list[str]:
    lines = []
    for i, (ours, other) in enumerate(zip(card.runs, cpu.runs, strict=False)):
        exact, name = (other.out.double(), "the CPU") if other.exact is None else (other.exact, "the reference")
        lines.append(f"card, run {i} ({ours.kernel}): {difference(ours.out, exact, ours.q_indptr, name)}")
    if not card.runs:
        for i, (result, on_cpu) in enumerate(zip(card.results, cpu.results, strict=False)):
            lines.append(f"card, result {i}: {difference(result, on_cpu.double(), [], 'the CPU')}")
    return lines


def difference(out: torch.Tensor, exact: torch.Tensor, q_indptr: list[int], other: str) -> str:
    """Whether an output agrees with another one, or the first place where it does not."""
    tolerance = _TOLERANCES.get(out.dtype, 3e-2)
    ours, theirs = out.double(), exact.double()
    is_row_of_request = ~theirs.flatten(1).isnan().all(1) if theirs.dim() > 1 else torch.ones(len(theirs)).bool()
    apart = (ours - theirs).abs()
    is_apart = (ours.isnan() != theirs.isnan()) | (apart > tolerance * theirs.abs().clamp(min=1.0))
    is_apart &= is_row_of_request.view(-1, *(1 for _ in theirs.shape[1:]))
    largest = float(apart.nan_to_num(0.0).max()) if apart.numel() else 0.0
    if not bool(is_apart.any()):
        return f"agrees with {other}, largest difference {largest:.3g}"
    first = tuple(is_apart.nonzero()[0].tolist())
    place = ", ".join(f"{axis} {i}" for axis, i in zip(("row", "head", "column"), first, strict=False))
    request = next((r for r, end in enumerate(q_indptr[1:]) if first[0] < end), None)
    within = "" if request is None else f" (request {request})"
    return (
        f"parts from {other} at {place}{within}: {float(ours[first]):.6g} and {float(theirs[first]):.6g}; "
        f"{int(is_apart.sum())} of {out.numel()} elements differ"
    )
