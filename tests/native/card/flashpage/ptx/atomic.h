// In place of include/flashpage/ptx/atomic.h where kernels run on the host: one thread at a time, so everything is seen.
#pragma once
#include "flashpage/common/types.h"

namespace flashpage::ptx {

inline u32 add_acquire_release(u32* counter, u32 amount) {
  const u32 before = *counter;
  *counter += amount;
  return before;
}

}  // namespace flashpage::ptx
