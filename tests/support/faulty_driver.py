"""Processes in which one call of the CUDA driver, or one allocation of the host library, fails: a library that is
preloaded (tests/native/faulty_cuda.cpp) stands between the host library and the driver, the fake one of
tests/native/fake_cuda.cpp or a card's."""

from __future__ import annotations

import os

import programs
from native_build import shared_library

FAULTS = """
faulty = ctypes.CDLL(None)
faulty.faulty_failed.restype = faulty.faulty_name.restype = ctypes.c_char_p
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

def first_calls_fail():
    \"\"\"Those that a process makes once, each in a child of its own; returns the names.\"\"\"
    import os
    names = set()
    for number in range(1000):
        read, write = os.pipe()
        if (child := os.fork()) == 0:
            faulty.faulty_fail_call(number)
            error = ""
            try:
                host.check_handle(lib.fp_cuda_kernel_load(0, b"image", 5, b"attention"))
            except RuntimeError as caught:
                error = str(caught)
            failed = faulty.faulty_failed().decode()
            is_named = SAYS.get(failed, failed) in error if error else not failed or failed in SPARED
            os.write(write, failed.encode())
            os._exit(0 if is_named else 1)
        os.close(write)
        failed = os.read(read, 99).decode()
        os.close(read)
        assert os.waitpid(child, 0)[1] == 0, f"the first {failed} failed without a word"
        if not failed:
            break
        names.add(failed)
    assert lib.fp_cuda_device_count() > 0  # from here on cuInit is done
    return names

def every_function_has_failed(names):
    \"\"\"There or in a child (`names`), but those that free or name errors.\"\"\"
    for i in range(faulty.faulty_functions()):
        name = faulty.faulty_name(i).decode()
        assert name in names or not faulty.faulty_may_fail(i) or faulty.faulty_failures(i), f"{name} never failed"

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


def with_faults(code: str, *, fake: bool = True) -> str:
    """Runs the code in a process of its own, with the faulty library preloaded; returns what it prints."""
    preload = shared_library("faulty_cuda.cpp")
    environment = os.environ | {"LD_PRELOAD": str(preload)}
    environment["PYTHONPATH"] = os.pathsep.join((os.environ.get("PYTHONPATH", ""), os.path.dirname(__file__)))
    if fake:
        environment["LD_LIBRARY_PATH"] = str(shared_library("fake_cuda.cpp", "libcuda.so.1").parent)
    result = programs.run(["-c", code], env=environment)
    assert result.returncode == 0, f"status {result.returncode}\n{result.stdout}\n{result.stderr}"
    return result.stdout
