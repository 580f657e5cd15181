#include "cuda/driver.h"

#include <dlfcn.h>

#include <atomic>
#include <mutex>
#include <string>

namespace flashpage::cuda {
namespace {

struct Loaded {
  Driver functions;
  bool usable = false;
  std::string why_not;

  Loaded() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      why_not = "no CUDA driver: libcuda.so.1 is not on this machine";
      return;
    }
#define FP_CUDA_LOAD(member, symbol, parameters)                                                  \
  functions.member = reinterpret_cast<decltype(functions.member)>(dlsym(library, #symbol));       \
  if (functions.member == nullptr) {                                                              \
    why_not = "the CUDA driver has no " #symbol ": flashpage needs a driver of CUDA 12 or newer"; \
    return;                                                                                       \
  }
    FP_CUDA_FUNCTIONS(FP_CUDA_LOAD)
#undef FP_CUDA_LOAD
    const char* name = nullptr;
    if (Result result = functions.init(0); result != success) {
      functions.get_error_name(result, &name);
      why_not = std::string("cuInit: ") + (name != nullptr ? name : "unknown error");
      return;
    }
    usable = true;
  }
};

const Loaded& loaded() {
  static const Loaded once;
  return once;
}

}  // namespace

const Driver* driver() { return loaded().usable ? &loaded().functions : nullptr; }

const char* no_driver() { return loaded().why_not.c_str(); }

int32_t fail(Result result, const char* what) {
  const char* name = nullptr;
  const char* text = nullptr;
  driver()->get_error_name(result, &name);
  driver()->get_error_string(result, &text);
  return host::fail(FP_CUDA_ERROR, "%s: %s (%d, %s)", what, name != nullptr ? name : "unknown error", result,
                    text != nullptr ? text : "");
}

Context primary_context(int device) {
  constexpr int max_devices = 64;
  static std::atomic<Context> contexts[max_devices];
  static std::mutex retaining;
  const Driver* cuda = driver();
  if (cuda == nullptr) {
    host::fail(FP_NO_CUDA, "%s", no_driver());
    return nullptr;
  }
  if (device < 0 || device >= max_devices) {
    host::fail(FP_CUDA_ERROR, "device is %d: give the index of a CUDA device", device);
    return nullptr;
  }
  if (Context context = contexts[device].load(std::memory_order_acquire)) return context;
  std::lock_guard lock(retaining);
  if (Context context = contexts[device].load(std::memory_order_acquire)) return context;
  Device ordinal;
  Context context = nullptr;
  if (Result result = cuda->device_get(&ordinal, device); result != success) {
    fail(result, "cuDeviceGet");
    return nullptr;
  }
  RelaxedCapture relaxed(*cuda);
  if (Result result = cuda->device_primary_ctx_retain(&context, ordinal); result != success) {
    fail(result, "cuDevicePrimaryCtxRetain");
    return nullptr;
  }
  contexts[device].store(context, std::memory_order_release);
  return context;
}

}  // namespace flashpage::cuda

using namespace flashpage;

int32_t fp_cuda_device_count() {
  const cuda::Driver* cuda = cuda::driver();
  int count = 0;
  if (cuda == nullptr || cuda->device_get_count(&count) != cuda::success) return 0;
  return count;
}

static int32_t describe_device(const cuda::Driver& cuda, int device, fp_device_info& info) {
  cuda::Device ordinal;
  int major = 0, minor = 0, l2_bytes = 0;
  size_t memory_bytes = 0;
  FP_CUDA_TRY(device_get, &ordinal, device);
  FP_CUDA_TRY(device_get_name, info.name, sizeof(info.name), ordinal);
  FP_CUDA_TRY(device_get_attribute, &major, cuda::device_compute_capability_major, ordinal);
  FP_CUDA_TRY(device_get_attribute, &minor, cuda::device_compute_capability_minor, ordinal);
  FP_CUDA_TRY(device_get_attribute, &info.num_sms, cuda::device_multiprocessor_count, ordinal);
  FP_CUDA_TRY(device_get_attribute, &l2_bytes, cuda::device_l2_cache_size, ordinal);
  FP_CUDA_TRY(device_get_attribute, &info.shared_bytes_per_cta, cuda::device_max_shared_memory_per_block_optin,
              ordinal);
  FP_CUDA_TRY(device_get_attribute, &info.shared_bytes_per_sm, cuda::device_max_shared_memory_per_multiprocessor,
              ordinal);
  FP_CUDA_TRY(device_get_attribute, &info.clock_khz, cuda::device_clock_rate, ordinal);
  FP_CUDA_TRY(device_get_attribute, &info.memory_khz, cuda::device_memory_clock_rate, ordinal);
  FP_CUDA_TRY(device_get_attribute, &info.memory_bus_bits, cuda::device_global_memory_bus_width, ordinal);
  FP_CUDA_TRY(device_total_mem, &memory_bytes, ordinal);
  FP_CUDA_TRY(driver_get_version, &info.driver_version);
  info.sm = 10 * major + minor;
  info.memory_bytes = static_cast<int64_t>(memory_bytes);
  info.l2_bytes = l2_bytes;
  return FP_OK;
}

int32_t fp_cuda_device_info(int32_t device, fp_device_info* info) {
  if (cuda::driver() == nullptr) return host::fail(FP_NO_CUDA, "%s", cuda::no_driver());
  *info = {};
  return describe_device(*cuda::driver(), device, *info);
}
