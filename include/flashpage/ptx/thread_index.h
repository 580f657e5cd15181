// %tid.x, loaded where it is used.
#pragma once
#include "flashpage/common/types.h"

namespace flashpage::ptx {

// threadIdx.x, but the compiler keeps it in no register between uses.
FP_DEVICE int thread_index() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

}  // namespace flashpage::ptx
