// An fp_kernel: a CPU function, or a CUDA function of one device with its launch shape.
#pragma once
#include <string>

#include "cuda/driver.h"
#include "flashpage.h"

namespace flashpage::cuda {

// A kernel's launch configuration and the attributes to which it points.
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
  fp_cpu_function cpu = nullptr;  // set for a CPU kernel; then the members below are unused
  std::string entry{};            // name for messages
  const flashpage::cuda::Driver* driver = nullptr;
  flashpage::cuda::Context context = nullptr;
  flashpage::cuda::Library library = nullptr;
  flashpage::cuda::Function function = nullptr;
  fp_kernel_info info = {};
  bool waits_itself = false;  // for the launch before it, so that it may begin early: not PTX, which is of compute_80
};
