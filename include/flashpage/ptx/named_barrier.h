// bar.sync and bar.arrive with a name: a barrier of some of the CTA's warps.
#pragma once
#include "flashpage/common/types.h"

namespace flashpage::ptx {

FP_DEVICE void named_barrier(int name, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

// Arrives without waiting: signals the warps that wait.
FP_DEVICE void named_barrier_arrive(int name, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

}  // namespace flashpage::ptx
