"""The structs that csrc/abi_structs.py reads and writes, and csrc/cuda/cuda_api.h against the toolkit's cuda.h."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from native_build import ROOT, check_syntax

import flashpage
from flashpage import native
from flashpage.base import paths
from flashpage.native import library


def load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("abi_structs", ROOT / "csrc" / "abi_structs.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


abi_structs = load_generator()
BASE = (
    "// A pair.\nstruct Pair {\n  i32 first; /* ; */ static constexpr i32 count = 2;\n  float second[2], third;\n};\n"
)


def test_structs_are_read_as_they_are_declared() -> None:
    text = BASE + "struct fp_other;\nstruct alignas(16) fp_bound_pair {\n  const flashpage::Pair* where;\n"
    text += "  flashpage::Pair pairs[3];\n  char** names;\n  void (*call)(i32, void*);\n"
    text += "  FP_HOST_DEVICE i32 sum() const {\n    if (names) { return 1; }\n    return 2;\n  }\n  u16 last;\n};\n"
    known: dict[str, Any] = {}
    abi_structs.read_structs(text, "here.h", known)
    assert known["Pair"].fields == [("first", "c_int32"), ("second", "c_float * 2"), ("third", "c_float")]
    assert known["fp_bound_pair"][:2] == ("fp_bound_pair", "BoundPair")
    assert known["fp_bound_pair"].fields == [
        ("where", "c_void_p"),
        ("pairs", "Pair * 3"),
        ("names", "c_void_p"),
        ("call", "c_void_p"),
        ("last", "c_uint16"),
    ]


@pytest.mark.parametrize(
    "text, place",
    [
        (BASE + "struct Next : Pair {\n  i32 a;\n};", "here.h:6: `struct Next : Pair {`"),
        (BASE + "template <int n>\nstruct Next<n> { i32 a; };", "here.h:7: `struct Next<n>"),
        (BASE + "union Next {\n  i32 a;\n};", "here.h:6: `union Next"),
        (BASE + BASE, "here.h:7: Pair is also declared"),
        ("struct A {\n\n  // why\n  bool a;\n};", "here.h:4: `bool a;`"),
        ("struct A {\n  i32 a : 3;\n};", "here.h:2: `i32 a : 3;`"),
        ("struct A {\n  i32 a[size];\n};", "here.h:2: `i32 a"),
        ("struct A {\n  i32 a[2][2];\n};", "here.h:2: `i32 a"),
        ("struct A {\n  i32 a = 1;\n};", "here.h:2: `i32 a = 1;`"),
        ("struct A {\n  void *a, *b;\n};", r"here.h:2: `void \*a, \*b;`"),
        ("struct A {\n  void* a[2];\n};", "here.h:2: `void"),
        ("struct A {\n  i32 a;\n  A(int a) : a(a) {}\n};", "here.h:3: `A"),
        ("struct A {\n  Later a;\n};\nstruct Later {\n  i32 a;\n};", "here.h:2: `Later a;`"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_place(text: str, place: str) -> None:
    with pytest.raises(abi_structs.UnreadableError, match=place):
        abi_structs.read_structs(text, "here.h", {})


def test_a_field_is_written_in_its_header_alone(tmp_path: Path) -> None:
    """The generated module follows the header; if it did not, the compiler would refuse the generated assertions."""
    for name in abi_structs.SOURCES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tmp_path / name)
    digest = paths.hash_declarations(tmp_path, abi_structs.SOURCES)
    module, assertions = abi_structs.generate(tmp_path, digest)
    assert module == Path(native.structs.__file__).read_text()
    check_syntax(assertions)

    header = tmp_path / "include/flashpage/params/params.h"
    header.write_text(header.read_text().replace("  const void* q;", "  // new\n  i32 added;\n  const void* q;", 1))
    assert paths.hash_declarations(tmp_path, abi_structs.SOURCES) != digest
    changed, assertions = abi_structs.generate(tmp_path, digest)
    assert '("added", c_int32)' in changed and '("added", c_int32)' not in module
    with pytest.raises(AssertionError, match="static assertion failed"):
        check_syntax(assertions)


def test_comments_do_not_make_a_build_out_of_date(tmp_path: Path) -> None:
    (tmp_path / "a.h").write_text("i32 a;  // one\n\n  i32 b;\n")
    digest = paths.hash_declarations(tmp_path, ["a.h"])
    (tmp_path / "a.h").write_text("// another\ni32 a;\ni32 b;  // two\n")
    assert paths.hash_declarations(tmp_path, ["a.h"]) == digest
    (tmp_path / "a.h").write_text("i32 a;\ni64 b;\n")
    assert paths.hash_declarations(tmp_path, ["a.h"]) != digest


def test_a_library_of_another_build_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native.structs, "FINGERPRINT", "0")
    with pytest.raises(flashpage.FlashpageError, match=r"different builds: run .*build_host"):
        native.load.__wrapped__()


def test_a_library_without_a_fingerprint_is_refused() -> None:
    with pytest.raises(flashpage.FlashpageError, match=r"different builds: run .*build_host"):
        library._check_fingerprint(ctypes.CDLL(None), Path("libold.so"))


def test_headers_that_changed_since_the_build_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "hash_declarations", lambda *_: "0")
    with pytest.raises(flashpage.FlashpageError, match=r"headers of .* have changed .*: run .*build_host"):
        native.load.__wrapped__()


def test_a_checkout_that_was_never_built_names_the_command(tmp_path: Path) -> None:
    left_out = shutil.ignore_patterns("__pycache__", "lib", "structs.py", "aot_kernels")
    shutil.copytree(ROOT / "flashpage", tmp_path / "flashpage", ignore=left_out)
    command = [sys.executable, "-c", "from flashpage import native"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    last = result.stderr.strip().splitlines()[-1]
    assert "FlashpageError: the host library is not built" in last and "`python setup.py build_host`" in last


def test_a_struct_takes_no_attribute_that_is_no_field() -> None:
    with pytest.raises(AttributeError, match="no_field"):
        native.KvView().no_field = 1


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

// Whether two functions have equally many parameters, each a pointer in both or in neither, and of equal sizes.
template <class T> constexpr bool is_pointer = false;
template <class T> constexpr bool is_pointer<T*> = true;
template <class, class> constexpr bool same_signature = false;
template <class R, class... A, class S, class... B>
  requires(sizeof...(A) == sizeof...(B))
constexpr bool same_signature<R(A...), S(B...)> =
    ((sizeof(A) == sizeof(B) && is_pointer<A> == is_pointer<B>) && ... && (sizeof(R) == sizeof(S)));
constexpr bool same_text(const char* a, const char* b) { return *a == *b && (*a == 0 || same_text(a + 1, b + 1)); }

// cuda.h's macros rename a symbol that is an old version of its function.
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
