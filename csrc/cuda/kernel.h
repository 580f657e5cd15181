// What an fp_kernel is: a CPU function, or a CUDA function of one device with its launch shape.
#pragma once
#include <string>

#include "cuda/driver.h"
#include "flashpage.h"

namespace flashpage::cuda {

// How a kernel is launched. Holds what its config points at.
class LaunchShape {
 public:
  // cluster_size below 2: no clusters.
  LaunchShape(const fp_kernel_info& info, int grid, int cluster_size, Stream stream, bool enable_pdl);
  LaunchShape(const LaunchShape&) = delete;
  LaunchShape& operator=(const LaunchShape&) = delete;

  const LaunchConfig* config() const { return &config_; }

 private:
  LaunchAttribute attributes_[2] = {};
  LaunchConfig config_ = {};
};

}  // namespace flashpage::cuda

struct fp_kernel {
  fp_cpu_function cpu = nullptr;  // a CPU kernel where set; nothing below is
  std::string entry{};            // its name in messages
  const flashpage::cuda::Driver* driver = nullptr;
  flashpage::cuda::Context context = nullptr;
  flashpage::cuda::Library library = nullptr;
  flashpage::cuda::Function function = nullptr;
  fp_kernel_info info = {};
};
