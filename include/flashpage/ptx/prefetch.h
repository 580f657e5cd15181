// prefetch: a line of global memory into the L2, or into the SM's L1 too. cp.async.bulk.prefetch: many lines, by the copy
// engine.
#pragma once
#include "flashpage/common/types.h"

namespace flashpage::ptx {

FP_DEVICE void prefetch_to_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address) : "memory");
}
FP_DEVICE void prefetch_to_l1(const void* address) {
  asm volatile("prefetch.global.L1 [%0];" ::"l"(address) : "memory");
}

// Address and size are multiples of 16.
FP_DEVICE void prefetch_bulk_to_l2(const void* address, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(bytes) : "memory");
}

}  // namespace flashpage::ptx
