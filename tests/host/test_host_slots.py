"""Plan slots on plain memory (the CPU's), and the messages of plans that fail."""

from __future__ import annotations

import ctypes
import threading
from ctypes import byref

import numpy as np
import pytest
from plan_calls import PlanCall

from flashpage import native

SCHEDULE = native.Schedule(
    num_ctas=8,
    heads_on_axis=1,
    tile_q=16,
    tile_kv=64,
    ns_per_token=1,
    ns_per_unit=200,
    few_rows_cost=1,
    ns_per_piece=2000,
    min_piece_tokens=256,
    merge_rows=64,
)


class Batch:
    """Requests of the given lengths over pages of 16 tokens."""

    def __init__(self, *tokens: int) -> None:
        lengths = np.array(tokens, np.int32)
        self.kv_indptr = np.concatenate([[0], np.cumsum((lengths + 15) // 16)]).astype(np.int32)
        self.last_page_len = np.where(lengths > 0, (lengths - 1) % 16 + 1, 0).astype(np.int32)
        self.problem = native.ProblemStruct(
            batch=len(tokens),
            q_len_per_request=1,
            page_size=16,
            num_q_heads=8,
            num_kv_heads=2,
            visibility=native.Visibility(0, -1),
            kv_indptr=native.IndexArray(self.kv_indptr.ctypes.data, 1, 0, len(self.kv_indptr)),
            last_page_len=native.IndexArray(self.last_page_len.ctypes.data, 1, 0, len(tokens)),
        )


def plan(
    slots: int, batch: Batch, destination: np.ndarray, capacity: int | None = None
) -> tuple[int, native.PlanResult]:
    size = destination.nbytes if capacity is None else capacity
    call = PlanCall(batch.problem, SCHEDULE, slots=slots, destination=destination.ctypes.data, capacity=size)
    return call.plan(), call.struct.result


def test_the_plan_arrives_and_stays_readable() -> None:
    library = native.load()
    slots = native.check_handle(library.fp_slots_create(-1, 1 << 16))
    assert library.fp_slots_last(slots) is None
    for tokens in ((5000, 3, 700), (1,), (0, 40000, 0, 9)):
        batch, destination, direct = Batch(*tokens), np.zeros(1 << 16, np.uint8), np.zeros(1 << 16, np.uint8)
        status, result = plan(slots, batch, destination)
        native.check(status)
        native.check(
            library.fp_plan(
                byref(batch.problem), byref(SCHEDULE), direct.ctypes.data, direct.nbytes, byref(native.PlanResult())
            )
        )
        used = result.used_bytes
        last = np.frombuffer(ctypes.string_at(library.fp_slots_last(slots), used), np.uint8)
        np.testing.assert_array_equal(destination[:used], direct[:used])
        np.testing.assert_array_equal(last, direct[:used])
        assert (destination[used:] == 0).all()
    library.fp_slots_destroy(slots)


def test_a_staged_plan_and_its_page_numbers_are_copied_when_they_are_published() -> None:
    """Plans of several sets of options are published together, after the last one is made."""
    library = native.load()
    slots = native.check_handle(library.fp_slots_create(-1, 1 << 16))
    batch, destination = Batch(5000, 3, 700), np.zeros(1 << 16, np.uint8)
    native.check(plan(slots, Batch(1), destination)[0])
    before, address = destination.copy(), destination.ctypes.data
    call = PlanCall(batch.problem, SCHEDULE, slots=slots, destination=address, capacity=destination.nbytes)
    numbers = np.arange(1, call.batch.kv_end + 1, dtype=np.int32)
    buffer = np.zeros_like(numbers)
    call.batch.is_staged, call.batch.page_buffer, call.batch.page_source = 1, buffer.ctypes.data, numbers.ctypes.data
    for _ in range(3):
        native.check(call.plan())
    assert (destination == before).all() and not buffer.any()
    native.check(library.fp_plan_publish(call.address, 0))
    last = np.frombuffer(ctypes.string_at(library.fp_slots_last(slots), call.struct.result.used_bytes), np.uint8)
    np.testing.assert_array_equal(destination[: len(last)], last)
    assert (buffer == numbers).all() and call.batch.page_source is None
    library.fp_slots_destroy(slots)


def test_a_workspace_too_small_is_an_error_and_nothing_is_copied() -> None:
    slots = native.check_handle(native.load().fp_slots_create(-1, 1 << 16))
    destination = np.zeros(1 << 16, np.uint8)
    batch = Batch(*range(1, 400))
    status, result = plan(slots, batch, destination, capacity=1000)
    assert status == native.WORKSPACE_TOO_SMALL and result.used_bytes > 1000
    with pytest.raises(native.PlanError, match=str(result.used_bytes)):
        native.check(status)
    assert (destination == 0).all()
    native.check(plan(slots, batch, destination, capacity=result.used_bytes)[0])
    native.load().fp_slots_destroy(slots)


def test_a_slot_smaller_than_the_plan_is_replaced() -> None:
    slots = native.check_handle(native.load().fp_slots_create(-1, 256))
    destination = np.zeros(1 << 16, np.uint8)
    status, result = plan(slots, Batch(*range(1, 400)), destination)
    assert status == native.OK and result.used_bytes > 256
    last = ctypes.string_at(native.load().fp_slots_last(slots), result.used_bytes)
    assert destination[: result.used_bytes].tobytes() == last
    native.load().fp_slots_destroy(slots)


def test_wrong_lengths_are_reported() -> None:
    slots = native.check_handle(native.load().fp_slots_create(-1, 1 << 16))
    batch = Batch(100, 100)
    batch.last_page_len[1] = 17
    status, result = plan(slots, batch, np.zeros(1 << 16, np.uint8))
    assert (status, result.error_array, result.error_index, result.error_value) == (native.BAD_LENGTHS, 3, 1, 17)
    with pytest.raises(native.PlanError, match="17"):
        native.check(status)
    native.load().fp_slots_destroy(slots)


def test_slots_of_a_card_where_there_is_none_are_reported() -> None:
    if native.load().fp_cuda_device_count() > 0:
        pytest.skip("this machine has a card")
    with pytest.raises(native.DeviceError, match="no CUDA driver|cuInit"):
        native.check_handle(native.load().fp_slots_create(0, 4096))


def test_errors_belong_to_their_thread() -> None:
    library = native.load()
    assert library.fp_cpu_set_threads(-5) == native.INTERNAL
    seen: list[str] = []
    other = threading.Thread(target=lambda: seen.append(native.last_error()))
    other.start()
    other.join()
    assert seen == [""] and "-5" in native.last_error()


def test_a_missing_library_names_the_command_that_builds_it(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(native.paths, "library", lambda: tmp_path / "absent.so")
    with pytest.raises(native.FlashpageError, match="absent.so is missing: .*build_host"):
        native.load.__wrapped__()
