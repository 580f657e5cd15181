// %tid.x, read where it is used.
#pragma once
#include "flashpage/common/types.h"

namespace flashpage::ptx {

// threadIdx.x that the compiler does not keep in a register between uses.
FP_DEVICE int thread_index() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

}  // namespace flashpage::ptx
