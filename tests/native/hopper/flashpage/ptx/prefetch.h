// Reads the address, so that a wrong one is found.
#pragma once
#include "flashpage/common/types.h"

namespace flashpage::ptx {

inline void prefetch_to_l2(const void* address) { static_cast<void>(*static_cast<const volatile u8*>(address)); }
inline void prefetch_to_l1(const void* address) { prefetch_to_l2(address); }

}  // namespace flashpage::ptx
