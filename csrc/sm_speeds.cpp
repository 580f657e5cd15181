// Launching the kernel sm_speeds (include/flashpage/kernels/sm_speeds.h) and judging what it measured: once a process
// and device, in plan.
#include <algorithm>
#include <cstring>

#include "kernel.h"

namespace flashpage::cuda {
namespace {

constexpr uint64_t edge = 10'000, window = 60'000;  // nanoseconds
constexpr int tries = 3;                            // SMs may be busy with other work

// [num_sms] each, in the host's memory, which has the same address on the card.
struct Measured {
  uint64_t* begins;
  float* speeds;
  int num_sms;

  static size_t bytes(int num_sms) { return num_sms * (sizeof(uint64_t) + sizeof(float)); }

  Measured(void* memory, int num_sms)
      : begins(static_cast<uint64_t*>(memory)), speeds(reinterpret_cast<float*>(begins + num_sms)), num_sms(num_sms) {}

  void clear() const { std::memset(begins, 0, bytes(num_sms)); }

  // All SMs were seen, and read while the others did.
  bool at_once() const {
    const auto [first, last] = std::minmax_element(begins, begins + num_sms);
    return *first != 0 && *last - *first < edge;
  }
};

Result launch_and_wait(const fp_kernel& kernel, SmSpeedsParams params, Stream stream) {
  const LaunchConfig config{
      .grid_x = static_cast<unsigned>(kernel.info.num_sms),
      .grid_y = 1,
      .grid_z = 1,
      .block_x = static_cast<unsigned>(kernel.info.threads),
      .block_y = 1,
      .block_z = 1,
      .shared_bytes = static_cast<unsigned>(kernel.info.shared_bytes),
      .stream = stream,
      .attributes = nullptr,
      .num_attributes = 0,
  };
  void* kernel_params[] = {&params};
  const Result result = kernel.driver->launch_kernel_ex(&config, kernel.function, kernel_params, nullptr);
  return result == success ? kernel.driver->stream_synchronize(stream) : result;
}

// On a stream of its own: it waits for no work of the program and disturbs no capture.
int32_t measure(const fp_kernel& kernel, SmSpeedsParams params, const Measured& measured) {
  const Driver& cuda = *kernel.driver;
  Stream stream;
  FP_CUDA_TRY(stream_create, &stream, stream_non_blocking);
  Result result = launch_and_wait(kernel, params, stream);  // brings the buffer into the L2
  for (int i = 0; i < tries && result == success; ++i) {
    measured.clear();
    result = launch_and_wait(kernel, params, stream);
    if (measured.at_once()) break;
  }
  cuda.stream_destroy(stream);
  return result == success ? FP_OK : fail(result, "measuring what SMs read");
}

int32_t measure(const fp_kernel& kernel, const void* buffer, int64_t buffer_bytes, float* speeds) {
  const Driver& cuda = *kernel.driver;
  const int num_sms = kernel.info.num_sms;
  void* memory;
  FP_CUDA_TRY(mem_host_alloc, &memory, Measured::bytes(num_sms), host_alloc_portable);
  const Measured measured(memory, num_sms);
  const SmSpeedsParams params{
      .buffer = buffer,
      .buffer_bytes = static_cast<uint64_t>(buffer_bytes),
      .edge = edge,
      .window = window,
      .begins = reinterpret_cast<u64*>(measured.begins),
      .speeds = measured.speeds,
  };
  const int32_t status = measure(kernel, params, measured);
  std::fill_n(speeds, num_sms, 0.0f);
  if (status == FP_OK && measured.at_once()) std::copy_n(measured.speeds, num_sms, speeds);
  cuda.mem_free_host(memory);
  return status;
}

}  // namespace
}  // namespace flashpage::cuda

using namespace flashpage;

int32_t fp_cuda_sm_speeds(const fp_kernel* kernel, const void* buffer, int64_t buffer_bytes, float* speeds) {
  cuda::RelaxedCapture relaxed(*kernel->driver);
  cuda::CurrentContext current(*kernel->driver, kernel->context);
  return cuda::measure(*kernel, buffer, buffer_bytes, speeds);
}
