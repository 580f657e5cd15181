// Replaces include/flashpage/ptx/st_global.h.
#pragma once
#include "flashpage/common/types.h"

namespace flashpage::ptx {

inline void store_global(void* to, const uint4& value, bool is_wanted) {
  if (is_wanted) *static_cast<uint4*>(to) = value;
}

}  // namespace flashpage::ptx
