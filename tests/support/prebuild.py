"""Compiles the kernels of many cases in parallel before the first case runs."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import pickle
from collections import Counter
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import harness
import native_build
import torch
from cases.case import Case
from harness import Runner, contexts_of_plans
from inputs import make_inputs

OFTEN = 6  # plans of the table


class _Planned(Exception):
    """Ends a plan after it has requested its last kernel."""


@contextlib.contextmanager
def _recording(specs: Counter[Any]) -> Iterator[None]:
    """Plans request kernels as usual; they record the spec here and get no kernel."""
    from flashpage import jit, native
    from flashpage.kernels import ATTENTION

    last_requested = {"merge", "merge_columns", *(kernel.name for kernel in ATTENTION if kernel.merges_in_launch)}

    def record(spec: Any, device: Any = None) -> Any:
        specs[spec] += 1
        if spec.backend == "cpu" or spec.kernel in last_requested:
            raise _Planned
        return SimpleNamespace(info=native.KernelInfo(num_sms=1, ctas_per_sm=1))

    original, jit.get_kernel = jit.get_kernel, record
    try:
        yield
    finally:
        jit.get_kernel = original


def specs_of(cases: Iterable[Case], device: str) -> Counter[Any]:
    """Specs of all kernels for the cases' plans and runs, with how many plans request each."""
    import flashpage

    specs: Counter[Any] = Counter()
    no_values = mock.patch.object(torch, "randn", lambda *shape, generator: torch.empty(*shape))
    no_poison = mock.patch.object(harness, "poison", lambda tensor: tensor)  # of workspaces, which nothing reads here
    with _recording(specs), no_values, no_poison:
        for case in cases:
            # A case `at_run` plans with other values first, and then with its own.
            for variation in {case, dataclasses.replace(case, at_run=False)}:
                inputs = make_inputs(variation)
                for may_be_few in (True,) if device == "cpu" else (True, False):
                    with contextlib.suppress(_Planned), contexts_of_plans(may_be_few=may_be_few):
                        Runner(inputs, device, flashpage).run()
                        raise AssertionError(f"{case} planned without requesting a kernel")
    return specs


def shared_specs(cases: Iterable[Case], device: str) -> Counter[Any]:
    """`specs_of` by the first worker process of a run, whose other workers read what it found: the same cases take each
    of them seconds to plan."""
    run, cases = os.environ.get("PYTEST_XDIST_TESTRUNUID"), list(cases)
    if run is None:
        return specs_of(cases, device)
    found = native_build.folder_of("specs", run, device, *map(str, cases)) / "specs"
    with open(found.with_name("lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not found.exists():
            partial = found.with_name("partial")
            partial.write_bytes(pickle.dumps(specs_of(cases, device)))
            partial.rename(found)
    return pickle.loads(found.read_bytes())


@contextlib.contextmanager
def quick_builds() -> Iterator[None]:
    """Kernels of the CPU compile at -Og, here and in processes that start now. A given FLASHPAGE_CXX stays."""
    with mock.patch.dict(os.environ, {} if os.environ.get("FLASHPAGE_CXX") else native_build.quick_builds()):
        yield


def prebuild(cases: Iterable[Case], device: str) -> int:
    """Builds kernels that are missing; returns how many kernels the cases need.

    A kernel of the CPU that few plans request is built quickly: half of the table's time was compilers. The frequent
    ones, and every third one of test_cpu_kernel.py, are built as users' are.
    """
    from flashpage import jit

    specs = shared_specs(cases, device)
    rare = [spec for spec, plans in specs.items() if device == "cpu" and plans < OFTEN]
    with quick_builds():
        jit.prebuild(rare)
    jit.prebuild(specs, None if device == "cpu" else torch.device(device))
    return len(specs)
