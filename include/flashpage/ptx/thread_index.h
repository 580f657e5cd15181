// %tid.x and %nctaid.x, loaded where they are used.
#pragma once
#include "flashpage/common/types.h"

namespace flashpage::ptx {

// threadIdx.x, but the compiler keeps it in no register between uses.
FP_DEVICE int thread_index() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

// gridDim.x, likewise.
FP_DEVICE int grid_size() {
  int size;
  asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(size));
  return size;
}

}  // namespace flashpage::ptx
