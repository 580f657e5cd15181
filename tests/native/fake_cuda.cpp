// A libcuda.so.1 that records calls instead of driving a card, for tests/host/test_host_cuda.py: which driver functions
// the host library calls, in which order, under which context and capture mode. It refuses calls that a driver refuses
// while a stream is captured.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "cuda/cuda_api.h"

using namespace flashpage::cuda;

namespace {

struct FakeEvent {
  int number;                // in the order of their creation
  bool is_captured = false;  // recorded while a stream was captured: not an event of the device
  int copies_before = 0;     // number of copies for which it waits
};

std::string record;
int events = 0;
int copies = 0, copies_done = 0;  // asynchronous copies to the device
bool capturing = false;
int failing_launches = 0;
int failing_allocations = 0;
bool refusing_maps = false;
thread_local Context current = nullptr;
thread_local int capture_mode = 0;
// Threads, shared bytes, rows that a cluster merges: for kernels without clusters and with them.
constexpr int launch_numbers[2][3] = {{384, 100000, 0}, {384, 100000, 16}};

Context context_of(int device) { return reinterpret_cast<Context>(static_cast<size_t>(1000 + device)); }

// Adds a line to the record: the text, then context and capture mode of the calling thread.
void note(const std::string& text) {
  record += text + " ctx=" + std::to_string(reinterpret_cast<size_t>(current)) +
            " mode=" + std::to_string(capture_mode) + "\n";
}

std::string name_of(Stream stream) { return "stream=" + std::to_string(reinterpret_cast<size_t>(stream)); }

// Adds the line of an event: which one, and on which stream.
void note_event(const char* name, Event event, Stream stream) {
  note(std::string(name) + " " + std::to_string(reinterpret_cast<FakeEvent*>(event)->number) + " " + name_of(stream));
}

Result unsafe(const char* name) {
  note(name);
  return capturing && capture_mode != capture_mode_relaxed ? 900 : success;
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT const char* fake_record() { return record.c_str(); }
EXPORT void fake_clear() { record.clear(); }
EXPORT void fake_capture(int on) { capturing = on; }
EXPORT void fake_finish_copies() { copies_done = copies; }
EXPORT void fake_fail_host_memory(int count) { failing_allocations = count; }
EXPORT void fake_fail_launches(int count) { failing_launches = count; }

EXPORT void fake_refuse_maps_of_bytes(int on) { refusing_maps = on; }

EXPORT Result cuInit(unsigned) { return success; }
EXPORT Result cuDriverGetVersion(int* version) { return *version = 13000, success; }
EXPORT Result cuGetErrorName(Result, const char** text) { return *text = "CUDA_ERROR_FAKE", success; }
EXPORT Result cuGetErrorString(Result, const char** text) { return *text = "refused by the fake", success; }
EXPORT Result cuDeviceGetCount(int* count) { return *count = 2, success; }
EXPORT Result cuDeviceGet(Device* device, int ordinal) { return *device = ordinal, ordinal < 2 ? success : 101; }
EXPORT Result cuDeviceGetName(char* name, int length, Device) { return strncpy(name, "Fake", length), success; }
EXPORT Result cuDeviceGetAttribute(int* value, int attribute, Device) { return *value = 100 + attribute, success; }
EXPORT Result cuDeviceTotalMem_v2(size_t* bytes, Device) { return *bytes = 1ull << 37, success; }
EXPORT Result cuDevicePrimaryCtxRetain(Context* context, Device device) {
  return *context = context_of(device), unsafe("retain");
}
EXPORT Result cuCtxGetCurrent(Context* context) { return *context = current, success; }
EXPORT Result cuCtxSetCurrent(Context context) { return current = context, success; }

EXPORT Result cuLibraryLoadData(Library* library, const void* code, int*, void**, unsigned, int*, void**, unsigned) {
  *library = reinterpret_cast<Library>(const_cast<void*>(code));
  return strcmp(static_cast<const char*>(code), "broken") == 0 ? 200 : unsafe("load");
}
EXPORT Result cuLibraryUnload(Library) { return unsafe("unload"); }
EXPORT Result cuLibraryGetKernel(Kernel* kernel, Library, const char* name) {
  *kernel = reinterpret_cast<Kernel>(strdup(name));
  return strcmp(name, "absent") == 0 ? 500 : success;
}
EXPORT Result cuKernelGetFunction(Function* function, Kernel kernel) {
  return *function = reinterpret_cast<Function>(kernel), success;
}
EXPORT Result cuLibraryGetGlobal(DevicePointer* address, size_t* bytes, Library library, const char* name) {
  const bool knows_clusters = strstr(reinterpret_cast<const char*>(library), "clusters") != nullptr;
  *address = reinterpret_cast<DevicePointer>(launch_numbers[knows_clusters]);
  *bytes = sizeof(launch_numbers[0]);
  return strcmp(name, "flashpage_launch") == 0 ? success : 500;
}
EXPORT Result cuFuncGetAttribute(int* value, int attribute, Function) { return *value = 60 + attribute, success; }
EXPORT Result cuFuncSetAttribute(Function, int attribute, int value) {
  return note("attribute " + std::to_string(attribute) + "=" + std::to_string(value)), success;
}
EXPORT Result cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Function, int threads, size_t shared) {
  return *blocks = threads == 384 && shared == 100000 ? 2 : 0, success;
}
// Simulates a card whose graphics processing clusters have ten SMs.
EXPORT Result cuOccupancyMaxActiveClusters(int* clusters, Function, const LaunchConfig* config) {
  const LaunchAttribute& attribute = config->attributes[0];
  if (config->num_attributes != 1 || attribute.id != launch_attribute_cluster_dimension) return 1;
  const int size = attribute.value.cluster.x;
  if (config->grid_x % size != 0 || attribute.value.cluster.y != 1 || attribute.value.cluster.z != 1) return 1;
  return *clusters = 12 * (10 / size), success;
}
EXPORT Result cuLaunchKernelEx(const LaunchConfig* config, Function function, void** params, void** extra) {
  std::string text = std::string("launch ") + reinterpret_cast<const char*>(function);
  text += " grid=" + std::to_string(config->grid_x * config->grid_y * config->grid_z);
  text += " block=" + std::to_string(config->block_x * config->block_y * config->block_z);
  text += " shared=" + std::to_string(config->shared_bytes);
  text += " " + name_of(config->stream);
  for (unsigned i = 0; i < config->num_attributes; ++i) {
    const LaunchAttribute& attribute = config->attributes[i];
    text += " attribute" + std::to_string(attribute.id) + "=" + std::to_string(attribute.value.cluster.x);
  }
  text += " first=" + std::to_string(*static_cast<const unsigned long long*>(params[0]));
  const std::string name = reinterpret_cast<const char*>(function);
  if (name == "boxes" || name == "row_boxes") {  // record two maps of 128 bytes: of K and V, or of q and out
    const auto* maps = static_cast<const unsigned long long*>(params[2]) + (name == "boxes" ? 0 : 32);
    text += " maps=" + std::to_string(maps[0]) + "," + std::to_string(maps[16]);
  }
  note(text);
  if (extra != nullptr) return 1;
  return failing_launches > 0 ? (--failing_launches, 700) : success;
}
EXPORT Result cuTensorMapEncodeTiled(void* map, int type, unsigned rank, void* address, const uint64_t* dims,
                                     const uint64_t* strides, const unsigned* box, const unsigned* element_strides,
                                     int interleave, int swizzle, int l2_promotion, int fill) {
  std::string text = "map type=" + std::to_string(type) + " rank=" + std::to_string(rank);
  for (unsigned i = 0; i < rank; ++i) {
    text += (i == 0 ? " " : ",") + std::to_string(box[i]) + "/" + std::to_string(dims[i]);
    text += i == 0 ? "" : "@" + std::to_string(strides[i - 1]);
    if (element_strides[i] != 1) return 2;
  }
  for (int option : {interleave, swizzle, l2_promotion, fill}) text += " " + std::to_string(option);
  note(text);
  *static_cast<unsigned long long*>(map) = reinterpret_cast<size_t>(address);
  const bool is_misplaced = reinterpret_cast<size_t>(map) % 64 != 0;
  return is_misplaced || (refusing_maps && type == tensor_map_uint8) ? 1 : success;
}
EXPORT Result cuMemHostAlloc(void** address, size_t bytes, unsigned) {
  if (failing_allocations > 0) return --failing_allocations, 2;
  return *address = malloc(bytes), unsafe("host_alloc");
}
EXPORT Result cuMemFreeHost(void* address) { return free(address), unsafe("host_free"); }
EXPORT Result cuMemcpyHtoDAsync_v2(DevicePointer to, const void* from, size_t bytes, Stream) {
  note("copy " + std::to_string(bytes) + " from " + std::to_string(reinterpret_cast<size_t>(from)));
  if (!capturing) ++copies;
  return memcpy(reinterpret_cast<void*>(to), from, bytes), success;
}
EXPORT Result cuMemcpyDtoHAsync_v2(void* to, DevicePointer from, size_t bytes, Stream) {
  return memcpy(to, reinterpret_cast<void*>(from), bytes), unsafe("copy_back");
}
EXPORT Result cuEventCreate(Event* event, unsigned flags) {
  *event = reinterpret_cast<Event>(new FakeEvent{++events});
  return note("event_create"), flags == event_disable_timing ? success : 1;
}
EXPORT Result cuEventDestroy_v2(Event event) {
  return delete reinterpret_cast<FakeEvent*>(event), note("event_destroy"), success;
}
EXPORT Result cuEventRecord(Event event, Stream stream) {
  auto* recorded = reinterpret_cast<FakeEvent*>(event);
  recorded->is_captured = capturing;
  recorded->copies_before = copies;
  return note_event("event_record", event, stream), success;
}
EXPORT Result cuEventQuery(Event event) {
  const auto* queried = reinterpret_cast<FakeEvent*>(event);
  if (Result refused = queried->is_captured ? 907 : unsafe("event_query")) return refused;
  return queried->copies_before <= copies_done ? success : 600;
}
EXPORT Result cuEventSynchronize(Event event) {
  auto* awaited = reinterpret_cast<FakeEvent*>(event);
  copies_done = std::max(copies_done, awaited->copies_before);
  return awaited->is_captured ? 907 : unsafe("event_synchronize");
}
EXPORT Result cuStreamCreate(Stream* stream, unsigned flags) {
  return *stream = reinterpret_cast<Stream>(77), flags == stream_non_blocking ? unsafe("stream_create") : 1;
}
EXPORT Result cuStreamCreateWithPriority(Stream* stream, unsigned flags, int priority) {
  if (flags != stream_non_blocking || priority >= 0) return 1;
  const Result result = unsafe("stream_create_with_priority");
  if (result == success) *stream = reinterpret_cast<Stream>(78);
  return result;
}
EXPORT Result cuStreamWaitEvent(Stream stream, Event event, unsigned flags) {
  note_event("wait_event", event, stream);
  return flags != 0 || reinterpret_cast<FakeEvent*>(event)->is_captured != capturing ? 1 : success;
}
EXPORT Result cuStreamDestroy_v2(Stream stream) { return note("stream_destroy " + name_of(stream)), success; }
EXPORT Result cuStreamSynchronize(Stream) { return unsafe("stream_synchronize"); }
EXPORT Result cuStreamIsCapturing(Stream, int* status) { return *status = capturing, success; }
EXPORT Result cuThreadExchangeStreamCaptureMode(int* mode) { return std::swap(*mode, capture_mode), success; }
