"""The CPU's thread pool, through fp_run: every CTA runs once, for any number of callers, also after a fork."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import programs
import pytest
from native_build import shared_library

from flashpage import native


@pytest.fixture(autouse=True)
def default_threads() -> Iterator[None]:
    yield
    native.check(native.load().fp_cpu_set_threads(0))


def kernel(name: str) -> int:
    library = ctypes.CDLL(str(shared_library("host_kernels.cpp")))
    return native.check_handle(
        native.load().fp_kernel_from_function(ctypes.cast(getattr(library, name), ctypes.c_void_p))
    )


class Counting:
    """Arguments of one fp_run of `count_ctas`, and its counts."""

    def __init__(self, num_ctas: int) -> None:
        self.counts = np.zeros(num_ctas, np.int32)
        self.marks = np.zeros(num_ctas, np.int64)
        self.params = native.AttentionParams(q=self.marks.ctypes.data, out=self.counts.ctypes.data)
        self.args = native.RunArgs(count=1)
        self.args.launches[0] = native.RunLaunch(kernel("count_ctas"), ctypes.addressof(self.params), grid=num_ctas)

    def run(self) -> None:
        native.check(native.load().fp_run(ctypes.byref(self.args)))


@pytest.mark.parametrize("threads", [1, 2, 3, 8, 33])
@pytest.mark.parametrize("num_ctas", [0, 1, 2, 7, 300])
def test_every_cta_runs_once(threads: int, num_ctas: int) -> None:
    native.check(native.load().fp_cpu_set_threads(threads))
    assert native.load().fp_cpu_threads() == threads
    call = Counting(num_ctas)
    for repeat in range(1, 20):
        call.run()
        assert (call.counts == repeat).all()
    assert len(set(call.marks.tolist())) <= threads


def test_threads_share_the_work() -> None:
    native.check(native.load().fp_cpu_set_threads(4))
    call = Counting(3000)
    call.run()
    assert len(set(call.marks.tolist())) > 1


def test_many_callers_at_once() -> None:
    """More callers than the pool serves at a time: the others run their loops alone."""
    native.check(native.load().fp_cpu_set_threads(3))
    calls = [Counting(40) for _ in range(40)]

    def repeat(call: Counting) -> None:
        for _ in range(10):
            call.run()

    callers = [threading.Thread(target=repeat, args=(call,)) for call in calls]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert all((call.counts == 10).all() for call in calls)


def test_a_run_inside_a_run() -> None:
    native.check(native.load().fp_cpu_set_threads(4))
    inner = [Counting(9) for _ in range(50)]
    inner_args = (native.RunArgs * len(inner))(*(call.args for call in inner))
    params = native.AttentionParams()
    params.k.data = ctypes.cast(native.load().fp_run, ctypes.c_void_p).value
    params.v.data = ctypes.addressof(inner_args)
    outer = native.RunArgs(count=1)
    outer.launches[0] = native.RunLaunch(kernel("run_inside"), ctypes.addressof(params), grid=len(inner))
    native.check(native.load().fp_run(ctypes.byref(outer)))
    assert all((call.counts == 1).all() for call in inner)


def test_changing_the_number_of_threads_while_others_run() -> None:
    calls = [Counting(64) for _ in range(4)]
    done = threading.Event()

    def change() -> None:
        threads = 0
        while not done.wait(0.001):
            threads = threads % 5 + 1
            native.check(native.load().fp_cpu_set_threads(threads))

    changer = threading.Thread(target=change)
    changer.start()
    callers = [threading.Thread(target=lambda c=call: [c.run() for _ in range(100)]) for call in calls]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    done.set()
    changer.join()
    assert all((call.counts == 100).all() for call in calls)


def test_a_forked_child_has_a_pool_of_its_own() -> None:
    native.check(native.load().fp_cpu_set_threads(4))
    Counting(100).run()
    busy = threading.Event()
    stop = threading.Event()

    def keep_busy() -> None:
        call = Counting(100)
        while not stop.is_set():
            call.run()
            busy.set()

    other = threading.Thread(target=keep_busy)
    other.start()
    busy.wait()
    try:
        for _ in range(5):
            child = os.fork()
            if child == 0:
                call = Counting(3000)
                call.run()
                right = (call.counts == 1).all() and len(set(call.marks.tolist())) > 1
                os._exit(0 if right else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        stop.set()
        other.join()


DAEMON = """
import sys, threading, time, torch, flashpage
wrapper = flashpage.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1 << 22, dtype=torch.uint8))
lengths = torch.arange(9).int() * 8, torch.arange(64).int(), torch.full((8,), 16).int()
q, cache, out = torch.randn(8, 8, 128), torch.randn(64, 2, 16, 2, 128), torch.empty(8, 8, 128)
plan = lambda: wrapper.plan(*lengths, 8, 2, 128, 16, q_data_type=torch.float32)
run = lambda: wrapper.run(q, cache, out=out)
plan(), run()
def work():
    while True:
        {"plan": plan, "run": run}[sys.argv[1]]()
threading.Thread(target=work, daemon=True).start()
time.sleep(0.05)
"""


@pytest.mark.parametrize("call", ["plan", "run"])
def test_the_process_ends_while_a_daemon_thread_calls(call: str) -> None:
    """The thread may be in C++, which CPython then unwinds."""
    result = programs.run(["-c", DAEMON, call])
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(("text", "threads"), [("3", 3), ("", None)])
def test_the_environment_and_the_affinity_decide_the_default(text: str, threads: int | None) -> None:
    code = "from flashpage import native as host; print(host.load().fp_cpu_threads())"
    result = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"FLASHPAGE_THREADS": text}, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) == (threads or len(os.sched_getaffinity(0)))


def test_one_core_is_one_thread() -> None:
    code = "import os; os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:1])\n"
    code += "from flashpage import native as host; print(host.load().fp_cpu_threads())"
    environment = {k: v for k, v in os.environ.items() if k != "FLASHPAGE_THREADS"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert result.stdout.strip() == "1", result.stderr


def test_a_wrong_number_of_threads_is_reported() -> None:
    with pytest.raises(native.DeviceError, match="threads is -1: give 1 to 1024, or 0 for the default"):
        native.check(native.load().fp_cpu_set_threads(-1))
