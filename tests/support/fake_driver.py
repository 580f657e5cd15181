"""Runs code in another process with a CUDA driver that records calls, without a card."""

from __future__ import annotations

import os

import programs
from native_build import shared_library

PRELUDE = """
import ctypes, threading
from ctypes import addressof, byref
from types import SimpleNamespace
from flashpage import native as host
from flashpage.plan.launches import Addresses, LaunchList
from flashpage.plan.mixed_batch import Part
from plan_calls import PlanCall
lib = host.load()
fake = ctypes.CDLL("libcuda.so.1")
fake.fake_record.restype = ctypes.c_char_p

def record():
    lines = fake.fake_record().decode().splitlines()
    fake.fake_clear()
    return lines

def kernel(name, device=0, image=b"\\x7fELF image"):
    return host.check_handle(lib.fp_cuda_kernel_load(device, image, len(image), name))

params = host.AttentionParams(q=4242)
merge_params = host.MergeParams(plan=5353)

def loaded(handle):
    info = host.KernelInfo()
    host.check(lib.fp_kernel_describe(handle, byref(info)))
    return SimpleNamespace(handle=handle, info=info)

def part(attention, merge=None, num_ctas=132, merge_ctas=0, cluster_size=0):
    prepared = SimpleNamespace(attention=SimpleNamespace(handle=attention), merge=merge, merge_ctas=1)
    prepared.choice, prepared.most_merge_ctas = SimpleNamespace(spec=SimpleNamespace(ctas=1)), 4 * 116
    return Part(prepared, None, num_ctas, merge_ctas, cluster_size)

def launches_of(parts, structs, ahead=(), mask_tiles=None, fork=None):
    found = LaunchList()
    for handle, its in ahead:
        found.add_ahead(loaded(handle), addressof(its))
    found.add_parts(parts, structs, mask_tiles, fork)
    return found.args

def run(attention, merge=None, boxes=None, enable_pdl=0, ahead=(), mask_tiles=None, **values):
    structs = Addresses(addressof(params), addressof(merge_params), boxes)
    args = launches_of([part(attention, merge, **values)], [structs], ahead, mask_tiles)
    args.stream, args.enable_pdl = 7, enable_pdl
    return lib.fp_run(byref(args))

class Planning:
    def __init__(self, device=0, slot_bytes=1 << 16):
        import numpy as np
        self.slots = host.check_handle(lib.fp_slots_create(device, slot_bytes))
        self.destination = np.zeros(slot_bytes, np.uint8)
        self.kv_indptr = np.zeros(9, np.int32)
        self.last_page_len = np.zeros(8, np.int32)

    def problem(self, tokens):
        import numpy as np
        self.kv_indptr[:] = np.arange(9) * -(-tokens // 16)
        self.last_page_len[:] = (tokens - 1) % 16 + 1
        return host.ProblemStruct(
            batch=8, q_len_per_request=1, page_size=16, num_q_heads=8, num_kv_heads=2, visibility=(0, -1),
            kv_indptr=host.IndexArray(self.kv_indptr.ctypes.data, 1, 0, 9),
            last_page_len=host.IndexArray(self.last_page_len.ctypes.data, 1, 0, 8),
        )

    schedule = host.Schedule(num_ctas=16, heads_on_axis=0, tile_q=16, tile_kv=64, ns_per_token=4, ns_per_unit=400,
                             few_rows_cost=1, ns_per_piece=1500, min_piece_tokens=128, max_pieces=32, merge_rows=8)

    def plan(self, tokens=1000, capacity=None):
        where = dict(slots=self.slots, destination=self.destination.ctypes.data)
        call = PlanCall(self.problem(tokens), self.schedule, capacity=capacity or self.destination.nbytes, **where)
        status = call.plan(7)
        self.result = call.struct.result
        self.was_captured = call.struct.was_captured
        return status

    def arrived(self):
        last = ctypes.string_at(lib.fp_slots_last(self.slots), self.result.used_bytes)
        return self.destination[: self.result.used_bytes].tobytes() == last
"""


def with_fake_driver(code: str) -> None:
    """Runs the code in a process that loads tests/native/fake_cuda.cpp as libcuda.so.1."""
    driver = shared_library("fake_cuda.cpp", "libcuda.so.1")
    paths = os.pathsep.join((os.environ.get("PYTHONPATH", ""), os.path.dirname(__file__)))
    environment = os.environ | {"LD_LIBRARY_PATH": str(driver.parent), "PYTHONPATH": paths}
    result = programs.run(["-c", PRELUDE + code], env=environment)
    assert result.returncode == 0, result.stderr
