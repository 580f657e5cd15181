// In place of include/flashpage/ptx/atomic.h where kernels run on the host. CTAs may be processes that share memory.
#pragma once
#include <sched.h>

#include "flashpage/common/types.h"

namespace flashpage::ptx {

inline u32 add_acquire_release(u32* counter, u32 amount) {
  return __atomic_fetch_add(counter, amount, __ATOMIC_ACQ_REL);
}
inline u32 load_acquire(const u32* counter) {
  sched_yield();  // who waits lets others go on
  return __atomic_load_n(counter, __ATOMIC_ACQUIRE);
}

}  // namespace flashpage::ptx
