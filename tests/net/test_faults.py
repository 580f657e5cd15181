"""Makes each call of the CUDA driver and each allocation fail once. The error must name the call, nothing may leak, and
later calls must work.

A preloaded library (tests/native/faulty_cuda.cpp) stands between the host library and the driver. Without a card the
driver is the fake one of tests/native/fake_cuda.cpp.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from bad_inputs.rows import equal, good_arguments
from bad_inputs.scene import Make
from bad_inputs.scenes import scenes
from fake_driver import PRELUDE
from faulty_driver import FAULTS, with_faults

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
    assert lib.fp_cuda_device_count() in (0, 2)  # 0 if the call fails
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


def test_every_call_of_the_driver_fails_once() -> None:
    """Of all scenarios, which together call every function of the driver that the library knows."""
    code = [f"{scenario}\nevery_call_fails_once({name!r}, scenario)" for name, scenario in SCENARIOS.items()]
    print(
        with_faults(
            "\n".join([PRELUDE, FAULTS, "names = first_calls_fail()", *code, "every_function_has_failed(names)"])
        )
    )


def test_every_allocation_fails_once() -> None:
    names = ("load", "plan", "run")
    code = [f"{SCENARIOS[name]}\nevery_allocation_fails_once({name!r}, scenario)" for name in names]
    print(with_faults("\n".join([PRELUDE, FAULTS, *code])))


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
