"""The host library's calls of the CUDA driver, tested against a driver that records calls, without a card.

Each test runs in another process, which loads tests/native/fake_cuda.cpp as libcuda.so.1.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from fake_driver import with_fake_driver
from native_build import shared_library


def test_loading_the_library_calls_no_driver() -> None:
    code = "from flashpage import native as host; host.load(); print('libcuda' in open('/proc/self/maps').read())"
    environment = os.environ | {"LD_LIBRARY_PATH": str(shared_library("fake_cuda.cpp", "libcuda.so.1").parent)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert result.stdout == "False\n", result.stderr


def test_the_target_of_a_card_follows_its_driver() -> None:
    """No compiler knows the fake card."""
    with_fake_driver("""
from flashpage.jit import targets
from flashpage.kernels import devices
assert targets.device_info(1).driver_version == 13000 and targets.cuda_target(1).arch == targets.PTX
devices.has_own_target = lambda sm: True
targets.cuda_target.cache_clear()
assert targets.cuda_target(1).arch == targets.device_info(1).sm
""")


def test_devices_are_described_without_a_context() -> None:
    with_fake_driver("""
assert lib.fp_cuda_device_count() == 2
info = host.DeviceInfo()
host.check(lib.fp_cuda_device_info(1, byref(info)))
assert (info.name, info.sm, info.num_sms, info.l2_bytes) == (b"Fake", 10 * 175 + 176, 116, 138)
assert (info.memory_bytes, info.shared_bytes_per_cta, info.driver_version) == (2**37, 197, 13000)
assert (info.shared_bytes_per_sm, info.clock_khz, info.memory_khz, info.memory_bus_bits) == (181, 113, 136, 137)
assert lib.fp_cuda_device_info(2, byref(info)) == host.CUDA_ERROR
assert host.last_error() == "cuDeviceGet: CUDA_ERROR_FAKE (101, refused by the fake)"
assert record() == []
""")


def test_a_kernel_is_resolved_at_load_even_while_a_stream_is_captured() -> None:
    with_fake_driver("""
fake.fake_capture(1)
handle = kernel(b"attention", device=1)
info = host.KernelInfo()
host.check(lib.fp_kernel_describe(handle, byref(info)))
assert (info.threads, info.shared_bytes, info.ctas_per_sm) == (384, 100000, 2)
assert (info.num_sms, info.registers, info.local_bytes) == (116, 64, 63)
lines = record()
assert "attribute 8=100000 ctx=1001 mode=2" in lines
assert all(line.endswith("mode=2") for line in lines), lines
context = ctypes.c_void_p(1)
fake.cuCtxGetCurrent(byref(context))
assert context.value is None
lib.fp_kernel_destroy(handle)
assert record() == ["unload ctx=0 mode=2"]
""")


@pytest.mark.parametrize(
    ("image", "entry", "ordinal", "message"),
    [
        ("broken", "attention", 0, "cuLibraryLoadData: CUDA_ERROR_FAKE (200, refused by the fake)"),
        ("image", "absent", 0, "cuLibraryGetKernel: CUDA_ERROR_FAKE (500, refused by the fake)"),
        ("image", "attention", 5, "cuDeviceGet: CUDA_ERROR_FAKE (101, refused by the fake)"),
        ("image", "attention", -1, "device is -1: give the index of a CUDA device"),
    ],
)
def test_a_kernel_that_does_not_load_is_reported(image: str, entry: str, ordinal: int, message: str) -> None:
    with_fake_driver(f"""
assert lib.fp_cuda_kernel_load({ordinal}, b"{image}", 5, b"{entry}") is None
assert host.last_error() == {message!r}, host.last_error()
""")


def test_a_run_is_one_launch_and_a_merge_another() -> None:
    with_fake_driver("""
attention, merge = kernel(b"attention"), kernel(b"merge")
fake.cuCtxSetCurrent(ctypes.c_void_p(1000))
record()
shape = "block=384 shared=100000 stream=7"
host.check(run(attention))
assert record() == [f"launch attention grid=132 {shape} first=4242 ctx=1000 mode=0"]
host.check(run(attention, merge, merge_ctas=0))
assert len(record()) == 1
host.check(run(attention, merge, merge_ctas=10, enable_pdl=1))
assert record() == [
    f"launch attention grid=132 {shape} attribute6=1 first=4242 ctx=1000 mode=0",
    f"launch merge grid=10 {shape} attribute6=1 first=5353 ctx=1000 mode=0",
]
host.check(run(attention, merge, merge_ctas=10**6))
assert record()[1].startswith("launch merge grid=464 ")  # 4 a multiprocessor
host.check(run(attention, num_ctas=0))
host.check(lib.fp_launch(attention, byref(params), 3, 9, 1))
assert record() == ["launch attention grid=3 block=384 shared=100000 stream=9 attribute6=1 first=4242 ctx=1000 mode=0"]
""")


def test_a_kernel_of_ptx_begins_after_its_predecessor() -> None:
    """It is compiled for compute_80, whose kernels do not wait themselves."""
    with_fake_driver("""
attention, merge = kernel(b"attention"), kernel(b"merge", image=b"//\\n.version 9.0\\n.target sm_80")
record()
host.check(run(attention, merge, merge_ctas=10, enable_pdl=1))
host.check(lib.fp_launch(merge, byref(merge_params), 3, 7, 1))
assert ["attribute6=1" in line for line in record()] == [True, False, False]
""")


def test_a_kernel_that_knows_clusters_is_launched_with_them() -> None:
    """The library reads how many clusters run at once when it loads a kernel with clusters, and no other kernel."""
    with_fake_driver("""
info = host.KernelInfo()
host.check(lib.fp_kernel_describe(kernel(b"attention"), byref(info)))
assert (info.cluster_rows, list(info.clusters)) == (0, [0] * 5)
assert not any("attribute 14" in line for line in record())
attention = kernel(b"attention", image=b"\\x7fELF clusters")
host.check(lib.fp_kernel_describe(attention, byref(info)))
assert (info.cluster_rows, list(info.clusters)) == (16, [232, 60, 24, 12, 0])
assert any(line.startswith("attribute 14=1 ") for line in record())
host.check(run(attention, num_ctas=64, cluster_size=8, enable_pdl=1))
host.check(run(attention, num_ctas=64, cluster_size=8))
host.check(run(attention, num_ctas=64, cluster_size=1))
launches = [line.split(" first=")[0].split("stream=7")[1] for line in record()]
assert launches == [" attribute6=1 attribute4=8", " attribute4=8", ""], launches
""")


BOXES = """
k = host.BoxForm(2, (64, 16, 1, 1), (128, 16, 8, 1000), (2048, 256, 65536))
v = host.BoxForm(1, (128, 16, 1, 1), (96, 16, 8, 1000), (768, 96, 32768))
boxes = host.KvBoxes(k, v)
params.k.data, params.v.data, params.plan = 1 << 20, 1 << 21, 1 << 22
attention = kernel(b"boxes")
record()
"""


def test_tensor_maps_are_encoded_at_every_run_and_passed_third() -> None:
    with_fake_driver(
        BOXES
        + """
host.check(run(attention, boxes=addressof(boxes)))
lines = [line.split(" ctx=")[0] for line in record()]
assert lines[:2] == [
    "map type=1 rank=4 64/128,16/16@2048,1/8@256,1/1000@65536 0 3 0 0",
    "map type=0 rank=4 128/96,16/16@768,1/8@96,1/1000@32768 0 3 0 0",
]
assert lines[2].endswith(f"maps={1 << 20},{1 << 21}") and len(lines) == 3
params.k.data, params.v.data = None, 1 << 23  # a cache without tokens also gets a map
host.check(run(attention, boxes=addressof(boxes)))
assert f"maps={1 << 22},{1 << 23}" in record()[2]
host.check(run(kernel(b"rows")))
assert not any(line.startswith("map") for line in record())
params.q, params.out, rows = 1 << 24, 1 << 25, host.KvBoxes(q=k, out=k)  # in addition to rows of K and V
host.check(run(kernel(b"row_boxes"), boxes=addressof(rows)))
lines = [line for line in record() if line.startswith(("map", "launch"))]
assert [line.split(",")[0] for line in lines[:2]] == ["map type=1 rank=4 64/128"] * 2
assert f" maps={1 << 24},{1 << 25}" in lines[2] and len(lines) == 3
"""
    )


def test_the_error_of_a_refused_map_has_its_numbers() -> None:
    with_fake_driver(
        BOXES
        + """
fake.fake_refuse_maps_of_bytes(1)
assert run(attention, boxes=addressof(boxes)) == host.CUDA_ERROR
assert host.last_error() == (
    "encoding the tensor map of V: address 0x200000, 1-byte elements, box 128 x 16 x 1 x 1 of 96 columns x 16 tokens "
    "x 8 heads x 1000 pages, strides of 768, 96 and 32768 bytes: CUDA_ERROR_FAKE (1, refused by the fake)"
)
assert not any(line.startswith("launch") for line in record())
"""
    )


def test_the_tiles_of_a_mask_are_found_before_they_are_read() -> None:
    with_fake_driver("""
attention, tiles = kernel(b"attention"), kernel(b"mask_tiles")
record()
mask_params = host.MaskTilesParams(plan=6464)
masked = dict(ahead=[(tiles, mask_params)], mask_tiles=addressof(mask_params))
host.check(run(attention, **masked, enable_pdl=1))
shape = "block=384 shared=100000 stream=7 attribute6=1"
found = [line.split(" ctx=")[0] for line in record()]  # of the first, as many as are resident
assert found == [f"launch mask_tiles grid=232 {shape} first=6464", f"launch attention grid=132 {shape} first=4242"]
found = LaunchList()  # for all runs of a plan
found.add_ahead(loaded(tiles), addressof(mask_params))
found.run(7)
host.check(run(attention, mask_tiles=addressof(mask_params)))
assert [line.split(" ")[1:3] for line in record()] == [["mask_tiles", "grid=232"], ["attention", "grid=132"]]
fake.fake_fail_launches(1)
assert run(attention, **masked) == host.CUDA_ERROR and len(record()) == 1
assert host.last_error().startswith("launching mask_tiles: ")
""")


def test_a_launch_makes_its_devices_context_current_and_puts_the_old_one_back() -> None:
    with_fake_driver("""
kernels = [kernel(b"attention", device) for device in (0, 1)]
record()
seen = []

def use(before):
    fake.cuCtxSetCurrent(ctypes.c_void_p(before))
    for k in kernels:
        host.check(run(k))
        host.check(lib.fp_launch(k, byref(params), 1, 0, 0))
    context = ctypes.c_void_p()
    fake.cuCtxGetCurrent(byref(context))
    seen.append((context.value or 0) == before)

for before in (0, 1000, 1001):
    thread = threading.Thread(target=use, args=(before,))
    thread.start()
    thread.join()
assert seen == [True] * 3
used = [line.split("ctx=")[1] for line in record()]
assert used == (["1000 mode=0"] * 2 + ["1001 mode=0"] * 2) * 3, used
""")


def test_a_failed_launch_is_an_error_and_the_merge_is_left_out() -> None:
    with_fake_driver("""
attention, merge = kernel(b"attention"), kernel(b"merge")
record()
fake.fake_fail_launches(1)
assert run(attention, merge, merge_ctas=4) == host.CUDA_ERROR
assert host.last_error() == "launching attention: CUDA_ERROR_FAKE (700, refused by the fake)"
assert len(record()) == 1
fake.fake_fail_launches(1)
assert lib.fp_launch(merge, byref(merge_params), 1, 0, 0) == host.CUDA_ERROR
other = []
thread = threading.Thread(target=lambda: other.append(host.last_error()))
thread.start()
thread.join()
assert other == [""] and host.last_error().startswith("launching merge: ")
""")


def test_planning_on_the_device_is_one_launch() -> None:
    with_fake_driver("""
import numpy as np
planner, memory, lens = kernel(b"plan"), np.zeros(1 << 18, np.uint8), np.array([5, 700], np.int64)
tables = host.Tables(seq_lens=lens.ctypes.data, table_stride=50, table_columns=50, lens_are_int64=1, batch=2,
                     q_len_per_request=1, page_size=16, num_q_heads=8, num_kv_heads=2, visibility=(0, -1))
record()
def plan(capacity, pdl):
    return lib.fp_tables_plan(planner, byref(tables), byref(Planning.schedule), memory.ctypes.data, capacity, 7, pdl)
host.check(plan(memory.nbytes, 1))
(line,) = record()
assert line.startswith("launch plan grid=1 block=384 shared=100000 stream=7 attribute6=1 "), line
assert not memory.any()
assert plan(1000, 0) == host.WORKSPACE_TOO_SMALL and record() == []
tables.batch = -1
assert plan(memory.nbytes, 0) == host.INTERNAL
""")
