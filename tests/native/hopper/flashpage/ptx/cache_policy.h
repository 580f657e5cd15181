// No L2 that could keep anything.
#pragma once
#include "flashpage/common/types.h"

namespace flashpage::ptx {

inline u64 evict_first() { return 0; }

}  // namespace flashpage::ptx
