// bar.sync and bar.arrive with a name: a barrier of some of the CTA's warps.
#pragma once
#include "flashpage/common/types.h"

namespace flashpage::ptx {

FP_DEVICE void named_barrier(int name, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

// Returns whether any of the threads votes yes.
FP_DEVICE bool named_barrier_or(int name, int threads, bool vote) {
  u32 any;
  asm volatile(
      "{\n.reg .pred vote, any;\nsetp.ne.b32 vote, %3, 0;\nbar.red.or.pred any, %1, %2, vote;\n"
      "selp.b32 %0, 1, 0, any;\n}"
      : "=r"(any)
      : "r"(name), "r"(threads), "r"(static_cast<u32>(vote))
      : "memory");
  return any != 0;
}

// Arrives without waiting: signals the warps that wait.
FP_DEVICE void named_barrier_arrive(int name, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

}  // namespace flashpage::ptx
