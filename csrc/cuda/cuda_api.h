// The part of the CUDA driver API that the host library uses. It is declared here so that the library builds without
// CUDA; tests/host/test_host_layout.py compares every layout, constant and signature with the toolkit's cuda.h if one
// is installed.
#pragma once
#include <cstddef>
#include <cstdint>

namespace flashpage::cuda {

using Result = int;  // CUresult
using Device = int;
using DevicePointer = unsigned long long;
using Context = struct ContextHandle*;
using Stream = struct StreamHandle*;
using Event = struct EventHandle*;
using Library = struct LibraryHandle*;
using Kernel = struct KernelHandle*;
using Function = struct FunctionHandle*;

inline constexpr Result success = 0;

inline constexpr int device_clock_rate = 13;
inline constexpr int device_multiprocessor_count = 16;
inline constexpr int device_memory_clock_rate = 36;
inline constexpr int device_global_memory_bus_width = 37;
inline constexpr int device_l2_cache_size = 38;
inline constexpr int device_compute_capability_major = 75;
inline constexpr int device_compute_capability_minor = 76;
inline constexpr int device_max_shared_memory_per_multiprocessor = 81;
inline constexpr int device_max_shared_memory_per_block_optin = 97;

inline constexpr int function_local_size_bytes = 3;
inline constexpr int function_num_regs = 4;
inline constexpr int function_max_dynamic_shared_size_bytes = 8;
inline constexpr int function_non_portable_cluster_size_allowed = 14;

inline constexpr int capture_status_none = 0;
inline constexpr int capture_mode_relaxed = 2;

inline constexpr unsigned host_alloc_portable = 1;
inline constexpr unsigned event_disable_timing = 2;
inline constexpr unsigned stream_non_blocking = 1;

inline constexpr int launch_attribute_cluster_dimension = 4;
inline constexpr int launch_attribute_programmatic_stream_serialization = 6;

inline constexpr int tensor_map_uint8 = 0;
inline constexpr int tensor_map_uint16 = 1;
inline constexpr int tensor_map_interleave_none = 0;
inline constexpr int tensor_map_swizzle_64b = 2;
inline constexpr int tensor_map_swizzle_128b = 3;
inline constexpr int tensor_map_l2_promotion_none = 0;
inline constexpr int tensor_map_fill_zeros = 0;  // CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE

struct LaunchAttribute {
  int id;
  char pad[4];
  union {
    char bytes[64];
    int programmatic_stream_serialization_allowed;
    struct {
      unsigned x, y, z;  // CTAs
    } cluster;
  } value;
};

struct LaunchConfig {
  unsigned grid_x, grid_y, grid_z;
  unsigned block_x, block_y, block_z;
  unsigned shared_bytes;
  Stream stream;
  LaunchAttribute* attributes;
  unsigned num_attributes;
};

// X(member, exported symbol, parameters): one line for each driver function; all return Result. Symbols have the
// version suffix that cuda.h's macros hide.
#define FP_CUDA_FUNCTIONS(X)                                                                                           \
  X(init, cuInit, (unsigned flags))                                                                                    \
  X(driver_get_version, cuDriverGetVersion, (int* version))                                                            \
  X(get_error_name, cuGetErrorName, (Result error, const char** text))                                                 \
  X(get_error_string, cuGetErrorString, (Result error, const char** text))                                             \
  X(device_get_count, cuDeviceGetCount, (int* count))                                                                  \
  X(device_get, cuDeviceGet, (Device * device, int ordinal))                                                           \
  X(device_get_name, cuDeviceGetName, (char* name, int length, Device device))                                         \
  X(device_get_attribute, cuDeviceGetAttribute, (int* value, int attribute, Device device))                            \
  X(device_total_mem, cuDeviceTotalMem_v2, (size_t* bytes, Device device))                                             \
  X(device_primary_ctx_retain, cuDevicePrimaryCtxRetain, (Context * context, Device device))                           \
  X(ctx_get_current, cuCtxGetCurrent, (Context * context))                                                             \
  X(ctx_set_current, cuCtxSetCurrent, (Context context))                                                               \
  X(library_load_data, cuLibraryLoadData,                                                                              \
    (Library * library, const void* code, int* jit_options, void** jit_values, unsigned num_jit, int* library_options, \
     void** library_values, unsigned num_library))                                                                     \
  X(library_unload, cuLibraryUnload, (Library library))                                                                \
  X(library_get_kernel, cuLibraryGetKernel, (Kernel * kernel, Library library, const char* name))                      \
  X(library_get_global, cuLibraryGetGlobal,                                                                            \
    (DevicePointer * address, size_t* bytes, Library library, const char* name))                                       \
  X(kernel_get_function, cuKernelGetFunction, (Function * function, Kernel kernel))                                    \
  X(func_get_attribute, cuFuncGetAttribute, (int* value, int attribute, Function function))                            \
  X(func_set_attribute, cuFuncSetAttribute, (Function function, int attribute, int value))                             \
  X(occupancy, cuOccupancyMaxActiveBlocksPerMultiprocessor,                                                            \
    (int* blocks, Function function, int block_size, size_t dynamic_shared_bytes))                                     \
  X(active_clusters, cuOccupancyMaxActiveClusters, (int* clusters, Function function, const LaunchConfig* config))     \
  X(launch_kernel_ex, cuLaunchKernelEx,                                                                                \
    (const LaunchConfig* config, Function function, void** kernel_params, void** extra))                               \
  X(tensor_map_encode_tiled, cuTensorMapEncodeTiled,                                                                   \
    (void* map, int data_type, unsigned rank, void* address, const uint64_t* dims, const uint64_t* strides,            \
     const unsigned* box, const unsigned* element_strides, int interleave, int swizzle, int l2_promotion, int fill))   \
  X(mem_host_alloc, cuMemHostAlloc, (void** address, size_t bytes, unsigned flags))                                    \
  X(mem_free_host, cuMemFreeHost, (void* address))                                                                     \
  X(memcpy_htod_async, cuMemcpyHtoDAsync_v2, (DevicePointer to, const void* from, size_t bytes, Stream stream))        \
  X(memcpy_dtoh_async, cuMemcpyDtoHAsync_v2, (void* to, DevicePointer from, size_t bytes, Stream stream))              \
  X(event_create, cuEventCreate, (Event * event, unsigned flags))                                                      \
  X(event_destroy, cuEventDestroy_v2, (Event event))                                                                   \
  X(event_record, cuEventRecord, (Event event, Stream stream))                                                         \
  X(event_query, cuEventQuery, (Event event))                                                                          \
  X(event_synchronize, cuEventSynchronize, (Event event))                                                              \
  X(stream_create, cuStreamCreate, (Stream * stream, unsigned flags))                                                  \
  X(stream_create_with_priority, cuStreamCreateWithPriority, (Stream * stream, unsigned flags, int priority))          \
  X(stream_wait_event, cuStreamWaitEvent, (Stream stream, Event event, unsigned flags))                                \
  X(stream_destroy, cuStreamDestroy_v2, (Stream stream))                                                               \
  X(stream_synchronize, cuStreamSynchronize, (Stream stream))                                                          \
  X(stream_is_capturing, cuStreamIsCapturing, (Stream stream, int* status))                                            \
  X(thread_exchange_capture_mode, cuThreadExchangeStreamCaptureMode, (int* mode))

}  // namespace flashpage::cuda
