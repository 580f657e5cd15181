// Counters in global memory, and flags between warps.
#pragma once
#include "flashpage/ptx/shared.h"

namespace flashpage::ptx {

// Adds to the counter and returns its value from before. What the CTA wrote before a barrier that precedes this call is
// visible to readers of the new value; what other CTAs wrote before their additions is visible after this call.
FP_DEVICE u32 add_acquire_release(u32* counter, u32 amount) {
  u32 before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(amount) : "memory");
  return before;
}

// Loads the counter. What other CTAs wrote before the additions that it counts is visible after this call.
FP_DEVICE u32 load_acquire(const u32* counter) {
  u32 value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}

// A flag between warps of a CTA: what the writer had seen before its release is visible after this load.
FP_DEVICE u32 load_acquire_shared(const u32* word) {
  u32 value;
  asm volatile("ld.acquire.cta.shared::cta.u32 %0, [%1];" : "=r"(value) : "r"(shared_address(word)) : "memory");
  return value;
}
FP_DEVICE void store_release_shared(u32* word, u32 value) {
  asm volatile("st.release.cta.shared::cta.u32 [%0], %1;" ::"r"(shared_address(word)), "r"(value) : "memory");
}

}  // namespace flashpage::ptx
