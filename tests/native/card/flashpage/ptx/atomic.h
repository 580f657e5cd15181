// Replaces include/flashpage/ptx/atomic.h on the host: one thread runs at a time, so all writes are visible.
#pragma once
#include "flashpage/common/types.h"

namespace flashpage::ptx {

inline u32 add_acquire_release(u32* counter, u32 amount) {
  const u32 before = *counter;
  *counter += amount;
  return before;
}

inline u32 load_acquire(const u32* from) { return *from; }
inline u32 load_acquire_shared(const u32* from) { return *from; }
inline void store_release_shared(u32* to, u32 value) { *to = value; }

}  // namespace flashpage::ptx
