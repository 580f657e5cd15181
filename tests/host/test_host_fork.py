"""Runs of two parts on two streams, as the host library asks for them of a driver that records calls: no card."""

from __future__ import annotations

from fake_driver import with_fake_driver

PRELUDE = """
few, many, merge = kernel(b"few"), kernel(b"many"), kernel(b"merge")
fake.cuCtxSetCurrent(ctypes.c_void_p(1000))
fork = host.check_handle(lib.fp_fork_create(0))
second = host.SecondPart(fork=fork, attention=many, merge=merge, plan=6464, num_ctas=36, merge_ctas=5)
record()

def run_parts(merge=None, **values):
    return run(few, merge, num_ctas=96, second=addressof(second), **values)

def lines():
    return [line.split(" ctx=")[0] for line in record()]

shape = "block=384 shared=100000"
forked = ["event_record 1 stream=7", "wait_event 1 stream=78"]
joined = ["event_record 2 stream=78", "wait_event 2 stream=7"]
launched_few = f"launch few grid=96 {shape} stream=78 first=4242"
launched_many = f"launch many grid=36 {shape} stream=7 first=4242"
"""


def test_two_parts_are_launched_on_two_streams_and_joined_behind_both() -> None:
    """Neither attention launch is a dependent one, as both stand behind an event; a merge is its attention's."""
    with_fake_driver(
        PRELUDE
        + """
for enable_pdl, given in ((0, ""), (1, "attribute6=1 ")):
    host.check(run_parts(enable_pdl=enable_pdl))
    merged = f"launch merge grid=5 {shape} stream=7 {given}first=6464"
    assert lines() == [*forked, launched_few, launched_many, merged, *joined]
second.merge_ctas = 0
host.check(run_parts(merge, merge_ctas=3))
merged = f"launch merge grid=3 {shape} stream=78 first=5353"
assert lines() == [*forked, launched_few, merged, launched_many, *joined] and params.plan is None
"""
    )


def test_a_fork_is_captured_as_it_is_run() -> None:
    with_fake_driver(
        PRELUDE
        + """
second.merge_ctas = 0
for capture in (1, 0, 1):
    fake.fake_capture(capture)
    host.check(run_parts())
    assert lines() == [*forked, launched_few, launched_many, *joined]
"""
    )


def test_a_launch_that_fails_leaves_the_streams_joined() -> None:
    with_fake_driver(
        PRELUDE
        + """
fake.fake_fail_launches(1)
assert run_parts() == host.CUDA_ERROR
assert host.last_error() == "launching the attention kernel: CUDA_ERROR_FAKE (700, refused by the fake)"
assert lines() == [*forked, launched_few, *joined]
"""
    )


def test_a_fork_is_made_and_destroyed_while_another_thread_captures() -> None:
    with_fake_driver("""
fake.fake_capture(1)
fork = host.check_handle(lib.fp_fork_create(1))
made = [line for line in record() if not line.startswith("retain")]
assert made == [f"{call} ctx=1001 mode=2" for call in ("stream_create_with_priority", "event_create", "event_create")]
lib.fp_fork_destroy(fork)
destroyed = ["event_destroy", "event_destroy", "stream_destroy stream=78"]
assert record() == [f"{call} ctx=1001 mode=2" for call in destroyed]
context = ctypes.c_void_p(1)
fake.cuCtxGetCurrent(byref(context))
assert context.value is None
lib.fp_fork_destroy(None)
assert lib.fp_fork_create(5) is None and record() == []
""")
