"""The ctypes mirrors against the C++ structs, and csrc/cuda/cuda_api.h against the toolkit's cuda.h."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest
import torch
from native_build import check_syntax

import flashpage
from flashpage import native
from flashpage.native import library, records

C_NAMES = {
    "IndexArray": "fp_index_array",
    "ProblemStruct": "fp_problem",
    "Schedule": "fp_schedule",
    "Tables": "fp_tables",
    "PlanResult": "fp_plan_result",
    "Parts": "fp_parts",
    "SecondPart": "fp_second_part",
    "MaskedBatch": "fp_masked_batch",
    "KernelInfo": "fp_kernel_info",
    "DeviceInfo": "fp_device_info",
    "BoxForm": "fp_box_form",
    "KvBoxes": "fp_kv_boxes",
    "RunArgs": "fp_run_args",
    "Python": "fp_python",
    "TensorForm": "fp_tensor_form",
    "BoundRun": "fp_bound_run",
    "LengthsStruct": "fp_lengths",
    "SlotsCall": "fp_slots_call",
}


def layout(name: str) -> tuple[int, dict[str, tuple[int, int]]]:
    """Size, and each field's offset and size, as Python sees them."""
    if name in records.RECORDS:
        record = records.RECORDS[name]
        return record.itemsize, {f: (o, t.itemsize) for f, (t, o) in record.fields.items()}
    struct = next(s for s in native.STRUCTS if s.__name__ == name)
    fields = {f: getattr(struct, f) for f, _ in struct._fields_}
    return ctypes.sizeof(struct), {f: (d.offset, d.size) for f, d in fields.items()}


@pytest.mark.parametrize("name", [s.__name__ for s in native.STRUCTS] + list(records.RECORDS))
def test_every_field_lies_where_python_thinks(name: str) -> None:
    size, fields = layout(name)
    struct = C_NAMES.get(name, f"flashpage::{name}")
    asserts = [f"static_assert(sizeof({struct}) == {size});"]
    asserts += [f"static_assert(offsetof({struct}, {f}) == {offset});" for f, (offset, _) in fields.items()]
    asserts += [f"static_assert(sizeof({struct}::{f}) == {bytes_});" for f, (_, bytes_) in fields.items()]
    check_syntax('#include <cstddef>\n#include "flashpage.h"\n' + "\n".join(asserts))


def test_the_library_knows_every_struct_and_no_other() -> None:
    loaded = native.load()
    for name in [s.__name__ for s in native.STRUCTS] + list(records.RECORDS):
        assert loaded.fp_sizeof(name.encode()) == layout(name)[0], name
    assert loaded.fp_sizeof(b"NoSuchStruct") == -1


def test_a_library_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "ABI_VERSION", library.ABI_VERSION + 1)
    with pytest.raises(flashpage.FlashpageError, match="ABI version .* build_host"):
        library._check_layout(native.load(), "libflashpage.so")


def test_fast_div_is_what_the_header_makes() -> None:
    divisors = [1, 2, 3, 4, 5, 7, 8, 12, 48, 64, 100, 1000, 4096, 65537, 2**30, 2**31 - 1]
    asserts = []
    for d in divisors:
        made = native.make_fast_div(d)
        numbers = f"{made.divisor}u, {made.multiplier}u, {made.shift}u"
        asserts.append(f"static_assert(same(flashpage::make_fast_div({d}u), {numbers}));")
        for n in (0, 1, d - 1, d, 2**31 - 1):
            assert (n >> made.shift if made.multiplier == 0 else n * made.multiplier >> (32 + made.shift)) == n // d
    same = "constexpr bool same(flashpage::FastDiv f, unsigned d, unsigned m, unsigned s)"
    same += "{ return f.divisor == d && f.multiplier == m && f.shift == s; }\n"
    check_syntax('#include "flashpage.h"\n' + same + "\n".join(asserts))


def cuda_include() -> Path | None:
    folders = [Path(os.environ[v]) / "include" for v in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(v)]
    return next((f for f in [*folders, Path("/usr/local/cuda/include")] if (f / "cuda.h").is_file()), None)


CUDA_API_CHECK = r"""
#include <cuda.h>
#include "cuda/cuda_api.h"
#include "flashpage.h"
namespace fp = flashpage::cuda;

// The same number of parameters, each of the same size and as much a pointer or not.
template <class T> constexpr bool is_pointer = false;
template <class T> constexpr bool is_pointer<T*> = true;
template <class, class> constexpr bool same_signature = false;
template <class R, class... A, class S, class... B>
  requires(sizeof...(A) == sizeof...(B))
constexpr bool same_signature<R(A...), S(B...)> =
    ((sizeof(A) == sizeof(B) && is_pointer<A> == is_pointer<B>) && ... && (sizeof(R) == sizeof(S)));
constexpr bool same_text(const char* a, const char* b) { return *a == *b && (*a == 0 || same_text(a + 1, b + 1)); }

// A symbol that cuda.h's macros rename is an old version of the function.
#define TEXT_(x) #x
#define EXPANDED(x) TEXT_(x)
#define CHECK(member, symbol, parameters) \
  static_assert(same_text(#symbol, EXPANDED(symbol)), #symbol " is not the newest version"); \
  static_assert(same_signature<decltype(symbol), fp::Result parameters>, #symbol);
namespace flashpage::cuda { FP_CUDA_FUNCTIONS(CHECK) }

static_assert(sizeof(flashpage::TensorMap) == sizeof(CUtensorMap));
static_assert(sizeof(fp::LaunchConfig) == sizeof(CUlaunchConfig));
static_assert(sizeof(fp::LaunchAttribute) == sizeof(CUlaunchAttribute));
#define FIELD(ours, our_field, theirs, their_field) \
  static_assert(offsetof(ours, our_field) == offsetof(theirs, their_field) && \
                sizeof(ours::our_field) == sizeof(theirs::their_field));
FIELD(fp::LaunchConfig, grid_x, CUlaunchConfig, gridDimX)
FIELD(fp::LaunchConfig, grid_z, CUlaunchConfig, gridDimZ)
FIELD(fp::LaunchConfig, block_x, CUlaunchConfig, blockDimX)
FIELD(fp::LaunchConfig, block_z, CUlaunchConfig, blockDimZ)
FIELD(fp::LaunchConfig, shared_bytes, CUlaunchConfig, sharedMemBytes)
FIELD(fp::LaunchConfig, stream, CUlaunchConfig, hStream)
FIELD(fp::LaunchConfig, attributes, CUlaunchConfig, attrs)
FIELD(fp::LaunchConfig, num_attributes, CUlaunchConfig, numAttrs)
FIELD(fp::LaunchAttribute, id, CUlaunchAttribute, id)
FIELD(fp::LaunchAttribute, value, CUlaunchAttribute, value)
FIELD(fp::LaunchAttribute, value.programmatic_stream_serialization_allowed, CUlaunchAttribute,
      value.programmaticStreamSerializationAllowed)
FIELD(fp::LaunchAttribute, value.cluster, CUlaunchAttribute, value.clusterDim)
FIELD(fp::LaunchAttribute, value.cluster.z, CUlaunchAttribute, value.clusterDim.z)

#define VALUE(ours, theirs) static_assert(static_cast<long long>(fp::ours) == static_cast<long long>(theirs));
VALUE(success, CUDA_SUCCESS)
VALUE(device_multiprocessor_count, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
VALUE(device_l2_cache_size, CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)
VALUE(device_clock_rate, CU_DEVICE_ATTRIBUTE_CLOCK_RATE)
VALUE(device_memory_clock_rate, CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE)
VALUE(device_global_memory_bus_width, CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH)
VALUE(device_max_shared_memory_per_multiprocessor, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR)
VALUE(device_compute_capability_major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
VALUE(device_compute_capability_minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
VALUE(device_max_shared_memory_per_block_optin, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
VALUE(function_local_size_bytes, CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)
VALUE(function_num_regs, CU_FUNC_ATTRIBUTE_NUM_REGS)
VALUE(function_max_dynamic_shared_size_bytes, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)
VALUE(function_non_portable_cluster_size_allowed, CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED)
VALUE(launch_attribute_cluster_dimension, CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
VALUE(capture_status_none, CU_STREAM_CAPTURE_STATUS_NONE)
VALUE(capture_mode_relaxed, CU_STREAM_CAPTURE_MODE_RELAXED)
VALUE(host_alloc_portable, CU_MEMHOSTALLOC_PORTABLE)
VALUE(event_disable_timing, CU_EVENT_DISABLE_TIMING)
VALUE(stream_non_blocking, CU_STREAM_NON_BLOCKING)
VALUE(launch_attribute_programmatic_stream_serialization, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION)
VALUE(tensor_map_uint8, CU_TENSOR_MAP_DATA_TYPE_UINT8)
VALUE(tensor_map_uint16, CU_TENSOR_MAP_DATA_TYPE_UINT16)
VALUE(tensor_map_interleave_none, CU_TENSOR_MAP_INTERLEAVE_NONE)
VALUE(tensor_map_swizzle_128b, CU_TENSOR_MAP_SWIZZLE_128B)
VALUE(tensor_map_l2_promotion_none, CU_TENSOR_MAP_L2_PROMOTION_NONE)
VALUE(tensor_map_fill_zeros, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)
"""


@pytest.mark.skipif(cuda_include() is None, reason="no CUDA toolkit here")
def test_our_driver_declarations_are_those_of_cuda_h() -> None:
    check_syntax("#include <cstddef>\n" + CUDA_API_CHECK, f"-I{cuda_include()}")


DLPACK_CHECK = r"""
#include <ATen/dlpack.h>
#include <cstddef>
#include "dlpack.h"
namespace fp = flashpage::dlpack;
static_assert(fp::major_version == DLPACK_MAJOR_VERSION);
static_assert(fp::cpu == kDLCPU && fp::signed_integer == kDLInt);
static_assert(sizeof(fp::Tensor) == sizeof(DLTensor) && sizeof(fp::ExchangeApi) == sizeof(DLPackExchangeAPI));
#define FIELD(ours, our_field, theirs, their_field) \
  static_assert(offsetof(fp::ours, our_field) == offsetof(theirs, their_field) && \
                sizeof(fp::ours::our_field) == sizeof(theirs::their_field));
FIELD(Tensor, data, DLTensor, data)
FIELD(Tensor, device.type, DLTensor, device.device_type)
FIELD(Tensor, device.index, DLTensor, device.device_id)
FIELD(Tensor, dims, DLTensor, ndim)
FIELD(Tensor, dtype.code, DLTensor, dtype.code)
FIELD(Tensor, dtype.bits, DLTensor, dtype.bits)
FIELD(Tensor, dtype.lanes, DLTensor, dtype.lanes)
FIELD(Tensor, shape, DLTensor, shape)
FIELD(Tensor, strides, DLTensor, strides)
FIELD(Tensor, byte_offset, DLTensor, byte_offset)
FIELD(ExchangeApi, header.major, DLPackExchangeAPI, header.version.major)
FIELD(ExchangeApi, tensor_from_python, DLPackExchangeAPI, dltensor_from_py_object_no_sync)
FIELD(ExchangeApi, current_stream, DLPackExchangeAPI, current_work_stream)
"""


@pytest.mark.skipif(not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="this torch has no DLPack functions")
def test_our_dlpack_declarations_are_those_of_torch() -> None:
    check_syntax(DLPACK_CHECK, f"-I{Path(torch.__file__).parent / 'include'}")
