// The host has no L2 policies.
#pragma once
#include "flashpage/common/types.h"

namespace flashpage::ptx {

inline u64 evict_first() { return 0; }
inline u64 evict_last() { return 0; }

}  // namespace flashpage::ptx
