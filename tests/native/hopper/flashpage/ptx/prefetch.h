// What is asked for is there.
#pragma once
#include "flashpage/common/types.h"

namespace flashpage::ptx {

inline void prefetch_to_l2(const void* address) { static_cast<void>(*static_cast<const volatile u8*>(address)); }
inline void prefetch_to_l1(const void* address) { prefetch_to_l2(address); }

}  // namespace flashpage::ptx
