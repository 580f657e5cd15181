// cp.async: copies from global to shared memory that use no registers, sm_80 and newer.
#pragma once
#include "flashpage/common/types.h"

namespace flashpage::ptx {

// Copies the first `valid_bytes` of `bytes` (4, 8 or 16) to shared memory and fills the others with zeros. Ordinary
// accesses are not ordered with the copy itself, only with commits, waits and barriers; staged tiles are accessed only
// between those.
template <int bytes>
FP_DEVICE void cp_async_first(u32 shared, const void* global, int valid_bytes) {
  static_assert(bytes == 4 || bytes == 8 || bytes == 16);
  if constexpr (bytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(valid_bytes));
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared), "l"(global), "n"(bytes),
                 "r"(valid_bytes));
  }
}

// Copies `bytes` bytes, or writes zeros if `exists` is false.
template <int bytes>
FP_DEVICE void cp_async(u32 shared, const void* global, bool exists) {
  cp_async_first<bytes>(shared, global, exists ? bytes : 0);
}

// As above, with a policy of cache_policy.h.
template <int bytes>
FP_DEVICE void cp_async(u32 shared, const void* global, bool exists, u64 policy) {
  static_assert(bytes == 4 || bytes == 8 || bytes == 16);
  int valid_bytes = exists ? bytes : 0;
  if constexpr (bytes == 16) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(shared), "l"(global),
                 "r"(valid_bytes), "l"(policy));
  } else {
    asm volatile("cp.async.ca.shared.global.L2::cache_hint [%0], [%1], %2, %3, %4;" ::"r"(shared), "l"(global),
                 "n"(bytes), "r"(valid_bytes), "l"(policy));
  }
}

FP_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `pending` of this thread's newest groups are in flight.
template <int pending>
FP_DEVICE void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

}  // namespace flashpage::ptx
