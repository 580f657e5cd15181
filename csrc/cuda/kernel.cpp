// Loads kernels and looks up everything that a launch needs, so that fp_run does not have to.
#include "cuda/kernel.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "cpu/cpu_ops.h"
#include "cpu/elements.h"

namespace flashpage::cuda {
namespace {

// Copies on a stream of its own, so that it waits for no work of the program and disturbs no capture.
int32_t read_device(const Driver& cuda, DevicePointer from, void* to, size_t bytes) {
  Stream stream;
  FP_CUDA_TRY(stream_create, &stream, stream_non_blocking);
  Result result = cuda.memcpy_dtoh_async(to, from, bytes, stream);
  if (result == success) result = cuda.stream_synchronize(stream);
  cuda.stream_destroy(stream);
  return result == success ? FP_OK : fail(result, "reading flashpage_launch");
}

// Finds how many clusters of each size run at once on an idle device, if the kernel uses clusters.
void find_clusters(const Driver& cuda, fp_kernel& kernel) {
  fp_kernel_info& info = kernel.info;
  if (info.cluster_rows == 0) return;
  info.clusters[0] = info.ctas_per_sm * info.num_sms;
  // Clusters of more than 8 CTAs: as many as a graphics processing cluster of the card can hold.
  const bool may_be_large =
      cuda.func_set_attribute(kernel.function, function_non_portable_cluster_size_allowed, 1) == success;
  for (int i = 1; i < (may_be_large ? 5 : 4); ++i) {
    const int size = 1 << i, grid = info.clusters[0] / size * size;
    if (grid == 0) break;
    const LaunchShape shape(info, grid, size, nullptr, false);
    int found = 0;
    if (cuda.active_clusters(&found, kernel.function, shape.config()) != success) break;
    info.clusters[i] = std::min(found, grid / size);
  }
}

int32_t resolve(const Driver& cuda, int device, const char* entry, fp_kernel& kernel) {
  Kernel handle;
  DevicePointer launch_address;
  size_t launch_bytes;
  int launch[3] = {};
  FP_CUDA_TRY(library_get_kernel, &handle, kernel.library, entry);
  FP_CUDA_TRY(kernel_get_function, &kernel.function, handle);
  FP_CUDA_TRY(library_get_global, &launch_address, &launch_bytes, kernel.library, "flashpage_launch");
  if (launch_bytes != sizeof(launch)) {
    return host::fail(FP_INTERNAL, "%s: flashpage_launch has %zu bytes, expected %zu", entry, launch_bytes,
                      sizeof(launch));
  }
  if (int32_t status = read_device(cuda, launch_address, launch, launch_bytes); status != FP_OK) return status;
  fp_kernel_info& info = kernel.info;
  info.threads = launch[0];
  info.shared_bytes = launch[1];
  info.cluster_rows = launch[2];
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
  find_clusters(cuda, kernel);
  return FP_OK;
}

int32_t load(const Driver& cuda, int device, const void* image, const char* entry, fp_kernel& kernel) {
  RelaxedCapture relaxed(cuda);
  CurrentContext current(cuda, kernel.context);
  if (int32_t status = current.status(); status != FP_OK) return status;
  FP_CUDA_TRY(library_load_data, &kernel.library, image, nullptr, nullptr, 0, nullptr, nullptr, 0);
  int32_t status = resolve(cuda, device, entry, kernel);
  if (status != FP_OK) cuda.library_unload(kernel.library);
  return status;
}

}  // namespace

LaunchShape::LaunchShape(const fp_kernel_info& info, int grid, int cluster_size, Stream stream, bool enable_pdl) {
  unsigned count = 0;
  if (enable_pdl) {
    LaunchAttribute& pdl = attributes_[count++];
    pdl.id = launch_attribute_programmatic_stream_serialization;
    pdl.value.programmatic_stream_serialization_allowed = 1;
  }
  if (cluster_size > 1) {
    LaunchAttribute& clusters = attributes_[count++];
    clusters.id = launch_attribute_cluster_dimension;
    clusters.value.cluster = {static_cast<unsigned>(cluster_size), 1, 1};
  }
  config_ = {.grid_x = static_cast<unsigned>(grid),
             .grid_y = 1,
             .grid_z = 1,
             .block_x = static_cast<unsigned>(info.threads),
             .block_y = 1,
             .block_z = 1,
             .shared_bytes = static_cast<unsigned>(info.shared_bytes),
             .stream = stream,
             .attributes = attributes_,
             .num_attributes = count};
}

}  // namespace flashpage::cuda

using namespace flashpage;

fp_kernel* fp_kernel_from_function(fp_cpu_function function) {
  fp_kernel* made = nullptr;
  host::guarded("fp_kernel_from_function", [&] {
    made = new fp_kernel;
    made->cpu = function;
    return FP_OK;
  });
  return made;
}

fp_kernel* fp_cuda_kernel_load(int32_t device, const void* image, int64_t, const char* entry) {
  fp_kernel* made = nullptr;
  host::guarded("fp_cuda_kernel_load", [&]() -> int32_t {
    auto kernel = std::make_unique<fp_kernel>();
    kernel->entry = entry;
    kernel->context = cuda::primary_context(device);
    if (kernel->context == nullptr) return FP_CUDA_ERROR;
    kernel->driver = cuda::driver();
    kernel->waits_itself = std::strncmp(static_cast<const char*>(image), "\177ELF", 4) == 0;  // a cubin
    const int32_t status = cuda::load(*kernel->driver, device, image, entry, *kernel);
    if (status == FP_OK) made = kernel.release();
    return status;
  });
  return made;
}

const fp_kernel* fp_cpu_merge_kernel(int32_t element_type) {
  static const fp_kernel kernels[] = {{.cpu = host::merge_partials<float>},
                                      {.cpu = host::merge_partials<Half>},
                                      {.cpu = host::merge_partials<Bf16>},
                                      {.cpu = host::merge_partials<E4m3>}};
  if (element_type >= 0 && element_type < 4) return &kernels[element_type];
  host::fail(FP_INTERNAL, "element type %d is none of 0 (fp32), 1 (fp16), 2 (bf16), 3 (e4m3)", element_type);
  return nullptr;
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
