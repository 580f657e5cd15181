"""Runs of two parts on two streams, tested against a driver that records calls, without a card."""

from __future__ import annotations

from fake_driver import with_fake_driver

PRELUDE = """
few, many, merge = kernel(b"few"), kernel(b"many"), kernel(b"merge")
fake.cuCtxSetCurrent(ctypes.c_void_p(1000))
fork = host.check_handle(lib.fp_fork_create(0))
second_params, second_merge = host.AttentionParams(q=4343), host.MergeParams(plan=6464)
structs = [Addresses(addressof(params), addressof(merge_params), None)]
structs.append(Addresses(addressof(second_params), addressof(second_merge), None))
record()

def run_parts(enable_pdl=0, first_merges=0, second_merges=0):
    parts = [part(few, merge, 96, first_merges), part(many, merge, 36, second_merges)]
    args = launches_of(parts, structs, fork=fork)
    args.stream, args.enable_pdl = 7, enable_pdl
    return lib.fp_run(byref(args))

def lines():
    return [line.split(" ctx=")[0] for line in record()]

shape = "block=384 shared=100000"
forked = ["event_record 1 stream=7", "wait_event 1 stream=78"]
joined = ["event_record 2 stream=78", "wait_event 2 stream=7"]
launched_few = f"launch few grid=96 {shape} stream=78 first=4242"
launched_many = f"launch many grid=36 {shape} stream=7 first=4343"
"""


def test_two_parts_are_launched_on_two_streams_and_joined_behind_both() -> None:
    """Neither attention launch is a dependent launch, as both follow an event; a merge is one."""
    with_fake_driver(
        PRELUDE
        + """
for enable_pdl, given in ((0, ""), (1, "attribute6=1 ")):
    host.check(run_parts(enable_pdl, second_merges=5))
    merged = f"launch merge grid=5 {shape} stream=7 {given}first=6464"
    assert lines() == [*forked, launched_few, launched_many, merged, *joined]
host.check(run_parts(first_merges=3))
merged = f"launch merge grid=3 {shape} stream=78 first=5353"
assert lines() == [*forked, launched_few, merged, launched_many, *joined]
"""
    )


def test_a_fork_is_captured_as_it_is_run() -> None:
    with_fake_driver(
        PRELUDE
        + """
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
assert host.last_error() == "launching few: CUDA_ERROR_FAKE (700, refused by the fake)"
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
