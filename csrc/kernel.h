// What an fp_kernel is: a CPU function, or a CUDA function of one device with its launch shape.
#pragma once
#include "driver.h"
#include "flashpage.h"

struct fp_kernel {
  fp_cpu_attention cpu = nullptr;  // a CPU kernel where set; nothing below is
  const flashpage::cuda::Driver* driver = nullptr;
  flashpage::cuda::Context context = nullptr;
  flashpage::cuda::Library library = nullptr;
  flashpage::cuda::Function function = nullptr;
  fp_kernel_info info = {};
};
