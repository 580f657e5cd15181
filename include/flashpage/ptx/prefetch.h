// prefetch: brings a line of global memory to the L2, or also to the SM's L1.
#pragma once
#include "flashpage/common/types.h"

namespace flashpage::ptx {

FP_DEVICE void prefetch_to_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address) : "memory");
}
FP_DEVICE void prefetch_to_l1(const void* address) {
  asm volatile("prefetch.global.L1 [%0];" ::"l"(address) : "memory");
}

}  // namespace flashpage::ptx
