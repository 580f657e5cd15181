"""Makes each call of the CUDA driver and each allocation fail once. The error must name the call, nothing may leak, and
later calls must work.

A preloaded library (tests/native/faulty_cuda.cpp) stands between the host library and the driver. Without a card the
driver is the fake one of tests/native/fake_cuda.cpp.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import programs
import pytest
import torch
from bad_inputs.rows import equal, good_arguments
from bad_inputs.scenes import Make, scenes
from fake_driver import PRELUDE
from native_build import shared_library

FAULTS = """
faulty = ctypes.CDLL(None)
faulty.faulty_failed.restype = ctypes.c_char_p
KINDS = ("events", "streams", "libraries", "pinned memory")

# SAYS: what the error says if it does not name the call. SPARED: calls whose failure is no error, as the library has
# another way.
SAYS = {"cuMemHostAlloc": "allocating pinned memory", "cuLaunchKernelEx": "launching",
        "cuTensorMapEncodeTiled": "tensor map", "cuMemcpyDtoHAsync_v2": "reading flashpage_launch",
        "cuStreamSynchronize": "reading flashpage_launch",
        "cuThreadExchangeStreamCaptureMode": "900"}  # the mode stays, so a capture refuses the next call
SPARED = {"cuThreadExchangeStreamCaptureMode", "cuEventQuery", "cuOccupancyMaxActiveClusters", "cuFuncSetAttribute",
          "cuDeviceGetCount", "cuEventSynchronize", "cuCtxGetCurrent", "cuCtxSetCurrent"}

# What may stay alive: without an event to tell that its copy is done, a slot is never reused (csrc/plan/slots.cpp).
KEPT = {("plan", "cuEventRecord"): {"events": 1, "pinned memory": 1}}

def alive():
    return {kind: faulty.faulty_alive(i) for i, kind in enumerate(KINDS)}

def every_call_fails_once(name, scenario):
    \"\"\"Runs the scenario again and again; in run n the n-th call of the driver fails.\"\"\"
    refused = 0
    for number in range(1000):
        before = alive()
        faulty.faulty_fail_call(number)
        error = None
        try:
            scenario()
        except RuntimeError as caught:
            error = str(caught)
        faulty.faulty_fail_call(-1)
        failed = faulty.faulty_failed().decode()
        for kind, count in KEPT.get((name, failed), {}).items():
            before[kind] += count
        assert alive() == before, f"{name}: {failed} (call {number}) leaks: {before} -> {alive()}"
        if not failed:
            assert error is None, error
            break
        if error is None:
            assert failed in SPARED, f"{name}: {failed} (call {number}) failed without an error"
        else:
            refused += 1
            assert SAYS.get(failed, failed) in error, f"{name}: {failed} (call {number}) is not named: {error!r}"
        scenario()  # must work again
        assert alive() == before
    else:
        raise AssertionError("the scenario never ends")
    print(f"{name}: {number} calls, {refused} errors")
    assert refused > 0

def every_allocation_fails_once(name, scenario):
    refused = 0
    for number in range(1000):
        before = alive()
        faulty.faulty_fail_allocation(number)
        error = None
        try:
            scenario()
        except RuntimeError as caught:
            error = str(caught)
        faulty.faulty_fail_allocation(-1)
        happened = faulty.faulty_failed_allocations()
        assert alive() == before, f"{name}: allocation {number} leaks: {before} -> {alive()}"
        if not happened:
            assert error is None, error
            break
        refused += error is not None
        assert error is None or "memory" in error, f"{name}: allocation {number} gives the wrong error: {error!r}"
        scenario()
        assert alive() == before
    else:
        raise AssertionError("the scenario never ends")
    print(f"{name}: {number} allocations, {refused} errors")

def status(value):
    host.check(value)

class Freed:
    \"\"\"Frees its handles when the scenario ends, also by an error.\"\"\"
    def __init__(self):
        self.free = []
    def __enter__(self):
        return self
    def __exit__(self, *error):
        for function, handle in reversed(self.free):
            function(handle)
    def of(self, function, handle):
        found = host.check_handle(handle)
        self.free.append((function, found))
        return found
"""

SCENARIOS = {
    "load": """
def scenario():
    with Freed() as freed:
        handle = freed.of(lib.fp_kernel_destroy, lib.fp_cuda_kernel_load(0, b"clusters", 8, b"attention"))
        info = host.KernelInfo()
        status(lib.fp_kernel_describe(handle, byref(info)))
        assert (info.threads, info.ctas_per_sm, info.cluster_rows) == (384, 2, 16)
""",
    "describe": """
def scenario():
    info = host.DeviceInfo()
    status(lib.fp_cuda_device_info(1, byref(info)))
    assert info.num_sms == 116
""",
    "plan": """
def scenario():
    with Freed() as freed:
        planning = Planning.__new__(Planning)
        made = lib.fp_slots_create(0, 1 << 12)
        planning.slots = freed.of(lib.fp_slots_destroy, made)
        import numpy as np
        planning.destination = np.zeros(1 << 16, np.uint8)
        planning.kv_indptr, planning.last_page_len = np.zeros(9, np.int32), np.zeros(8, np.int32)
        for tokens in (100, 4000, 50, 9, 70000):
            status(planning.plan(tokens))
            assert planning.arrived()
        fake.fake_finish_copies()
        status(planning.plan(333))
        assert planning.arrived()
        there = planning.destination.ctypes.data
        status(lib.fp_slots_copy(planning.slots, there, 64, there, 7))
""",
    "run": """
kernels = kernel(b"attention"), kernel(b"merge"), kernel(b"boxes"), kernel(b"gather")
k = host.BoxForm(2, (64, 16, 1, 1), (128, 16, 8, 1000), (2048, 256, 65536))
v = host.BoxForm(1, (128, 16, 1, 1), (96, 16, 8, 1000), (768, 96, 32768))
boxes = host.KvBoxes(k, v)
params.k.data, params.v.data, params.plan = 1 << 20, 1 << 21, 1 << 22
def scenario():
    attention, merge, with_boxes, gather = kernels
    with Freed() as freed:
        fork = freed.of(lib.fp_fork_destroy, lib.fp_fork_create(0))
        structs = Addresses(addressof(params), addressof(merge_params), addressof(boxes))
        parts = [part(with_boxes, merge, merge_ctas=4), part(attention)]
        args = launches_of(parts, [structs, Addresses(addressof(params), addressof(merge_params), None)],
                           ahead=[(gather, params)], fork=fork)
        args.stream, args.enable_pdl = 7, 1
        record()
        status(lib.fp_run(byref(args)))
        lines = record()
        assert sum(line.startswith("launch") for line in lines) == 4, lines
        status(lib.fp_launch(attention, byref(params), 3, 9, 1))
""",
    "capture": """
handle = kernel(b"attention")
kept = []
def scenario():
    fake.fake_capture(1)
    try:
        with Freed() as freed:
            fork = freed.of(lib.fp_fork_destroy, lib.fp_fork_create(0))
            structs = Addresses(addressof(params), addressof(merge_params), None)
            args = launches_of([part(handle), part(handle)], [structs, structs], fork=fork)
            args.stream = 7
            status(lib.fp_run(byref(args)))
            freed.of(lib.fp_kernel_destroy, lib.fp_cuda_kernel_load(0, b"image", 5, b"attention"))
    finally:
        fake.fake_capture(0)
""",
}


def with_faults(code: str, *, fake: bool = True) -> str:
    """Runs the code in a process of its own, with the faulty library preloaded; returns what it prints."""
    preload = shared_library("faulty_cuda.cpp")
    environment = os.environ | {"LD_PRELOAD": str(preload)}
    environment["PYTHONPATH"] = os.pathsep.join(
        (os.environ.get("PYTHONPATH", ""), os.path.dirname(__file__) + "/../support")
    )
    if fake:
        environment["LD_LIBRARY_PATH"] = str(shared_library("fake_cuda.cpp", "libcuda.so.1").parent)
    result = programs.run(["-c", code], env=environment)
    assert result.returncode == 0, f"status {result.returncode}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_call_of_the_driver_fails_once(name: str) -> None:
    print(with_faults(PRELUDE + FAULTS + SCENARIOS[name] + f"\nevery_call_fails_once({name!r}, scenario)\n"))


@pytest.mark.parametrize("name", ["load", "plan", "run"])
def test_every_allocation_fails_once(name: str) -> None:
    print(with_faults(PRELUDE + FAULTS + SCENARIOS[name] + f"\nevery_allocation_fails_once({name!r}, scenario)\n"))


FACTORIES = "empty zeros ones full tensor arange empty_like zeros_like full_like cat stack"
METHODS = "to clone contiguous new_empty new_zeros new_full int long float cpu"


@contextmanager
def allocation_fails(after: int) -> Iterator[list[str]]:
    """After `after` allocating calls of torch, the next one raises OutOfMemoryError; its name is put into the list."""
    failed: list[str] = []
    left = after

    def failing(name: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left == -1:
                failed.append(name)
                raise torch.OutOfMemoryError(f"no memory for {name}")
            return original(*args, **kwargs)

        return call

    with ExitStack() as patches:
        for holder, names in ((torch, FACTORIES), (torch.Tensor, METHODS)):
            for name in names.split():
                patches.enter_context(mock.patch.object(holder, name, failing(name, getattr(holder, name))))
        yield failed


STEPS = [name for name, scene in scenes().items() if len(scene.steps) > 2 and "ContextParallel" not in name]


@pytest.mark.parametrize("name", STEPS)
def test_every_allocation_of_torch_fails_once(name: str, device: str) -> None:
    """Each allocation of each method of a wrapper; afterwards the same object must plan and run as before."""
    scene, make = scenes()[name], Make(device)
    if device != "cpu" and not scene.cuda:
        pytest.skip("runs on the CPU alone")
    given = good_arguments(scene, make)
    found, expected = scene.run(given)
    for number in range(300):
        error = None
        with allocation_fails(number) as failed:
            try:
                _, result = scene.run(given, found, 1)
            except (torch.OutOfMemoryError, ValueError) as caught:
                error = caught
        again = scene.run(good_arguments(scene, make), found, 1)[1]
        assert equal(again, expected), f"a wrong result after {failed} (call {number}) failed: {error}"
        if not failed:
            assert equal(result, expected)
            return
        assert error is None or "no memory" in str(error), f"{failed} (call {number}) gives the wrong error: {error!r}"
    raise AssertionError("the scene never ends")
