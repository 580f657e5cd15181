"""Compiles the kernels of many cases in parallel before the first case runs."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from cases.case import Case
from harness import Runner, contexts_of_plans
from inputs import make_inputs


class _Planned(Exception):
    """Ends a plan after it has requested its last kernel."""


@contextlib.contextmanager
def _recording(specs: dict[Any, None]) -> Iterator[None]:
    """Plans request kernels as usual; they record the spec here and get no kernel."""
    from flashpage import jit
    from flashpage.kernels import ATTENTION

    last_requested = {"merge", *(kernel.name for kernel in ATTENTION if kernel.merges_in_launch)}

    def record(spec: Any, device: Any = None) -> Any:
        specs[spec] = None
        if spec.backend == "cpu" or spec.kernel in last_requested:
            raise _Planned
        return SimpleNamespace(info=SimpleNamespace(num_sms=1, ctas_per_sm=1))

    original, jit.get_kernel = jit.get_kernel, record
    try:
        yield
    finally:
        jit.get_kernel = original


def specs_of(cases: Iterable[Case], device: str) -> list[Any]:
    """Specs of all kernels for the cases' plans and runs."""
    import flashpage

    specs: dict[Any, None] = {}
    with _recording(specs):
        for case in cases:
            # A case `at_run` plans with other values first, and then with its own.
            for variation in {case, dataclasses.replace(case, at_run=False)}:
                inputs = make_inputs(variation)
                for may_be_few in (True,) if device == "cpu" else (True, False):
                    with contextlib.suppress(_Planned), contexts_of_plans(may_be_few=may_be_few):
                        Runner(inputs, device, flashpage).run()
                        raise AssertionError(f"{case} planned without requesting a kernel")
    return list(specs)


def prebuild(cases: Iterable[Case], device: str) -> int:
    """Builds kernels that are missing; returns how many kernels the cases need."""
    from flashpage import jit

    specs = specs_of(cases, device)
    jit.prebuild(specs, None if device == "cpu" else torch.device(device))
    return len(specs)
