// Loading kernels: everything a launch needs is looked up here, never in fp_run.
#include "kernel.h"

#include <memory>

namespace flashpage::cuda {
namespace {

// A copy on a stream of its own: it waits for no work of the program and disturbs no capture.
int32_t read_device(const Driver& cuda, DevicePointer from, void* to, size_t bytes) {
  Stream stream;
  FP_CUDA_TRY(stream_create, &stream, stream_non_blocking);
  Result result = cuda.memcpy_dtoh_async(to, from, bytes, stream);
  if (result == success) result = cuda.stream_synchronize(stream);
  cuda.stream_destroy(stream);
  return result == success ? FP_OK : fail(result, "reading flashpage_launch");
}

int32_t resolve(const Driver& cuda, int device, const char* entry, fp_kernel& kernel) {
  Kernel handle;
  DevicePointer launch_address;
  size_t launch_bytes;
  int launch[2];
  FP_CUDA_TRY(library_get_kernel, &handle, kernel.library, entry);
  FP_CUDA_TRY(kernel_get_function, &kernel.function, handle);
  FP_CUDA_TRY(library_get_global, &launch_address, &launch_bytes, kernel.library, "flashpage_launch");
  if (launch_bytes != sizeof(launch)) {
    return host::fail(FP_INTERNAL, "%s: flashpage_launch has %zu bytes, expected %zu", entry, launch_bytes,
                      sizeof(launch));
  }
  if (int32_t status = read_device(cuda, launch_address, launch, sizeof(launch)); status != FP_OK) return status;
  fp_kernel_info& info = kernel.info;
  info.threads = launch[0];
  info.shared_bytes = launch[1];
  FP_CUDA_TRY(func_set_attribute, kernel.function, function_max_dynamic_shared_size_bytes, info.shared_bytes);
  FP_CUDA_TRY(occupancy, &info.ctas_per_sm, kernel.function, info.threads, info.shared_bytes);
  FP_CUDA_TRY(func_get_attribute, &info.registers, function_num_regs, kernel.function);
  FP_CUDA_TRY(func_get_attribute, &info.local_bytes, function_local_size_bytes, kernel.function);
  Device ordinal;
  FP_CUDA_TRY(device_get, &ordinal, device);
  FP_CUDA_TRY(device_get_attribute, &info.num_sms, device_multiprocessor_count, ordinal);
  if (info.ctas_per_sm < 1) {
    return host::fail(FP_CUDA_ERROR, "%s: no CTA of %d threads with %d bytes of shared memory fits an SM of device %d",
                      entry, info.threads, info.shared_bytes, device);
  }
  return FP_OK;
}

int32_t load(const Driver& cuda, int device, const void* image, const char* entry, fp_kernel& kernel) {
  RelaxedCapture relaxed(cuda);
  CurrentContext current(cuda, kernel.context);
  FP_CUDA_TRY(library_load_data, &kernel.library, image, nullptr, nullptr, 0, nullptr, nullptr, 0);
  int32_t status = resolve(cuda, device, entry, kernel);
  if (status != FP_OK) cuda.library_unload(kernel.library);
  return status;
}

}  // namespace
}  // namespace flashpage::cuda

using namespace flashpage;

fp_kernel* fp_kernel_from_function(fp_cpu_attention function) {
  auto kernel = new fp_kernel;
  kernel->cpu = function;
  return kernel;
}

fp_kernel* fp_cuda_kernel_load(int32_t device, const void* image, int64_t, const char* entry) {
  auto kernel = std::make_unique<fp_kernel>();
  kernel->context = cuda::primary_context(device);
  if (kernel->context == nullptr) return nullptr;
  kernel->driver = cuda::driver();
  if (cuda::load(*kernel->driver, device, image, entry, *kernel) != FP_OK) return nullptr;
  return kernel.release();
}

void fp_kernel_destroy(fp_kernel* kernel) {
  if (kernel == nullptr) return;
  if (kernel->library != nullptr) {
    cuda::RelaxedCapture relaxed(*kernel->driver);
    kernel->driver->library_unload(kernel->library);
  }
  delete kernel;
}

int32_t fp_kernel_describe(const fp_kernel* kernel, fp_kernel_info* info) {
  *info = kernel->info;
  if (kernel->cpu != nullptr) {
    info->threads = 1;
    info->ctas_per_sm = 1;
    info->num_sms = fp_cpu_threads();
  }
  return FP_OK;
}
