"""Plan slots of a card, tested against a driver that records calls (fake_driver.py)."""

from __future__ import annotations

from fake_driver import with_fake_driver


def test_plans_in_flight_keep_their_slots() -> None:
    with_fake_driver("""
planning = Planning()
assert sum("host_alloc" in line for line in record()) == 2
sources = []
for step in range(5):  # no copy is ever done: every plan takes a slot of its own, and the host never waits
    host.check(planning.plan(1000 + step))
    assert planning.arrived()
    lines = record()
    sources += [line.split()[3] for line in lines if line.startswith("copy")]
    assert not any("synchronize" in line for line in lines), lines
assert len(set(sources)) == 5
fake.fake_finish_copies()
again = []
for step in range(20):
    host.check(planning.plan(500 + step))
    fake.fake_finish_copies()
    again += [line.split()[3] for line in record() if line.startswith("copy")]
assert set(again) == set(sources)
lib.fp_slots_destroy(planning.slots)
assert sum("host_free" in line for line in record()) == 5
""")


def test_a_host_far_ahead_waits_and_pinned_memory_is_given_back() -> None:
    """At most 64 MiB of plans are in flight. Slots that are not needed are freed, and every plan still arrives."""
    with_fake_driver("""
planning = Planning(slot_bytes=1 << 22)
count = lambda lines, name: sum(line.startswith(name) for line in lines)
record()
for step in range(40):  # no copy is done before it is waited for
    host.check(planning.plan(1000 + step))
    assert planning.arrived()
lines = record()
assert count(lines, "host_alloc") == 16 - 2 and count(lines, "event_synchronize") == 40 - 16
held = 16
fake.fake_finish_copies()
for step in range(1200):
    host.check(planning.plan(500 + step))
    assert planning.arrived()
    fake.fake_finish_copies()
    lines = record()
    held -= count(lines, "host_free")
    assert not count(lines, "host_alloc") and not count(lines, "event_synchronize")
assert held == 2
for step in range(600):  # three plans in flight all the time: they are not given back again and again
    host.check(planning.plan(500 + step))
    if step % 3 == 2:
        fake.fake_finish_copies()
    assert planning.arrived()
assert count(record(), "host_alloc") == 1
lib.fp_slots_destroy(planning.slots)
assert count(record(), "host_free") == 3
""")


def test_host_memory_goes_through_slots() -> None:
    """Page numbers for captured launches: the caller may overwrite them at once, and the host never waits."""
    with_fake_driver("""
import numpy as np
slots = host.check_handle(lib.fp_slots_create(0, 400))
source, destination = np.zeros(100, np.int32), np.zeros(100, np.int32)
record()
sources = []
for step in range(1, 6):
    source[:] = step
    host.check(lib.fp_slots_copy(slots, source.ctypes.data, 40 * step, destination.ctypes.data, 7))
    assert (destination[: 10 * step] == step).all() and not destination[10 * step :].any()
    lines = record()
    sources += [line.split()[3] for line in lines if line.startswith("copy")]
    assert not any("synchronize" in line for line in lines), lines
assert len(set(sources)) == 5 and str(source.ctypes.data) not in sources
fake.fake_finish_copies()
host.check(lib.fp_slots_copy(slots, source.ctypes.data, 400, destination.ctypes.data, 7))
assert [line.split()[3] for line in record() if line.startswith("copy")][0] in sources
assert lib.fp_slots_copy(slots, source.ctypes.data, 401, destination.ctypes.data, 7) == host.INTERNAL
lib.fp_slots_destroy(slots)
""")


def test_a_captured_plans_slot_is_never_written_again() -> None:
    with_fake_driver("""
planning = Planning()
host.check(planning.plan())
record()
fake.fake_capture(1)
host.check(planning.plan(700))
lines = record()
captured = next(line.split()[3] for line in lines if line.startswith("copy"))
assert not any(line.startswith("event_record") for line in lines), lines
assert planning.arrived()
host.check(planning.plan(700))
fake.fake_capture(0)
fake.fake_finish_copies()
for step in range(20):
    host.check(planning.plan(500 + step))
    fake.fake_finish_copies()
assert captured not in [line.split()[3] for line in record() if line.startswith("copy")]
lib.fp_slots_destroy(planning.slots)
assert sum("host_free" in line for line in record()) == 1  # of three: the two that the graph copies from stay
""")


def test_a_larger_ring_that_is_refused_leaves_the_present_one() -> None:
    """If pinned memory is short the plan fails, and later plans still have the slots of before."""
    with_fake_driver("""
planning = Planning()
host.check(planning.plan())
small = Planning(slot_bytes=planning.result.used_bytes // 2)
small.destination = planning.destination
record()
fake.fake_fail_host_memory(1)
assert small.plan() == host.CUDA_ERROR and "allocating pinned memory" in host.last_error()
assert not any(line.startswith(("host_free", "copy")) for line in record())
host.check(small.plan())
assert small.arrived() and sum(line.startswith("host_free") for line in record()) == 2
""")


def test_slots_are_made_and_destroyed_while_another_thread_captures() -> None:
    with_fake_driver("""
fake.fake_capture(1)
planning = Planning(device=1)
fake.fake_capture(0)
host.check(planning.plan())
fake.fake_capture(1)
lib.fp_slots_destroy(planning.slots)
assert all("mode=2" in line for line in record() if line.startswith(("host_", "event_synchronize", "retain")))
""")


def test_a_plan_that_fails_takes_no_slot() -> None:
    with_fake_driver("""
planning = Planning()
host.check(planning.plan())
record()
for _ in range(5):
    assert planning.plan(1000, capacity=64) == host.WORKSPACE_TOO_SMALL
assert not any(line.startswith(("copy", "host_alloc")) for line in record())
assert planning.arrived()
""")


def test_page_numbers_of_a_graph_are_copied_by_the_plan() -> None:
    """Either type goes through slots to the buffer that captured launches read; wrong numbers change nothing."""
    with_fake_driver(
        """
import numpy as np, torch
from flashpage.native import fastcall
planning = Planning()
call = PlanCall(planning.problem(1000), planning.schedule, slots=planning.slots,
                destination=planning.destination.ctypes.data, capacity=planning.destination.nbytes)
call.struct.row_class = host.RowClass(0, 2**62)
call.struct.gathered_rows_of_request = call.struct.gathered_rows = float("inf")
call.struct.contexts = -1
batch = call.batch
buffer, copies, lengths = np.full(600, -7, np.int32), np.zeros(1024, np.int32), np.zeros(4096, np.uint8)
batch.is_paged, batch.device_type = 1, 2
batch.page_buffer, batch.page_buffer_entries = buffer.ctypes.data, 600
batch.page_slots = host.check_handle(lib.fp_slots_create(0, 2400))
batch.page_copies, batch.most_page_copies = copies.ctypes.data, 1024
batch.copies, batch.bytes_of_a_copy = lengths.ctypes.data, 1024
kv_indptr, last = torch.from_numpy(planning.kv_indptr), torch.from_numpy(planning.last_page_len)
end = int(kv_indptr[-1])

def plan(pages):
    return fastcall.builtins().plan(call.address, 7, None, kv_indptr, last, None, pages)

for dtype in (torch.int32, torch.int64):
    pages = torch.randperm(end).to(dtype)
    assert plan(pages) == host.OK and batch.max_page == end - 1
    assert buffer[:end].tolist() == pages.tolist() and batch.page_numbers == buffer.ctypes.data
    before = buffer.copy()
    for wrong in (-1, 2**31) if dtype is torch.int64 else (-1,):
        pages[3] = wrong
        assert plan(pages) == host.OTHER_PAGES and (buffer == before).all()
batch.most_page_copies = end - 1
assert plan(torch.randperm(end)) == host.OTHER_PAGES
"""
    )
