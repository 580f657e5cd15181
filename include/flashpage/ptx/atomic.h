// Counters in global memory.
#pragma once
#include "flashpage/common/types.h"

namespace flashpage::ptx {

// The counter's value before; what the CTA wrote before a barrier that led here is visible to who sees the new value,
// and what others wrote before their additions is visible here.
FP_DEVICE u32 add_acquire_release(u32* counter, u32 amount) {
  u32 before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(amount) : "memory");
  return before;
}

// What others wrote before they added to the counter is visible once their additions are seen.
FP_DEVICE u32 load_acquire(const u32* counter) {
  u32 value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}

}  // namespace flashpage::ptx
