// Launching the kernel sm_groups (include/flashpage/kernels/sm_groups.h) and reading what it saw: once a process and
// device, in plan.
#include <cstring>

#include "kernel.h"

namespace flashpage::cuda {
namespace {

struct ClusterLaunch {
  const fp_kernel& kernel;
  unsigned cluster, num_ctas;  // CTAs of a cluster, and of the grid
};

Result launch(const ClusterLaunch& clusters, void* sms, Stream stream) {
  LaunchAttribute shape{};
  shape.id = launch_attribute_cluster_dimension;
  shape.value.cluster_dimension = {clusters.cluster, 1, 1};
  const LaunchConfig config{
      .grid_x = clusters.num_ctas,
      .grid_y = 1,
      .grid_z = 1,
      .block_x = static_cast<unsigned>(clusters.kernel.info.threads),
      .block_y = 1,
      .block_z = 1,
      .shared_bytes = static_cast<unsigned>(clusters.kernel.info.shared_bytes),
      .stream = stream,
      .attributes = &shape,
      .num_attributes = 1,
  };
  void* params[] = {&sms};
  return clusters.kernel.driver->launch_kernel_ex(&config, clusters.kernel.function, params, nullptr);
}

// On a stream of its own: it waits for no work of the program and disturbs no capture.
int32_t launch_and_wait(const ClusterLaunch& clusters, void* sms) {
  const Driver& cuda = *clusters.kernel.driver;
  Stream stream;
  FP_CUDA_TRY(stream_create, &stream, stream_non_blocking);
  Result result = launch(clusters, sms, stream);
  if (result == success) result = cuda.stream_synchronize(stream);
  cuda.stream_destroy(stream);
  return result == success ? FP_OK : fail(result, "launching clusters");
}

// The kernel writes to the host's memory, which has the same address on the card.
int32_t observe(const ClusterLaunch& clusters, uint32_t* sms) {
  const Driver& cuda = *clusters.kernel.driver;
  const size_t bytes = clusters.num_ctas * sizeof(uint32_t);
  void* seen;
  FP_CUDA_TRY(mem_host_alloc, &seen, bytes, host_alloc_portable);
  const int32_t status = launch_and_wait(clusters, seen);
  if (status == FP_OK) std::memcpy(sms, seen, bytes);
  cuda.mem_free_host(seen);
  return status;
}

}  // namespace
}  // namespace flashpage::cuda

using namespace flashpage;

int32_t fp_cuda_cluster_sms(const fp_kernel* kernel, int32_t cluster, int32_t num_ctas, uint32_t* sms) {
  cuda::RelaxedCapture relaxed(*kernel->driver);
  cuda::CurrentContext current(*kernel->driver, kernel->context);
  return cuda::observe({*kernel, static_cast<unsigned>(cluster), static_cast<unsigned>(num_ctas)}, sms);
}
