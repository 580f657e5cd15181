// prefetch: a line of global memory into the L2, or into the SM's L1 too.
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
