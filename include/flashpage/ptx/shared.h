// Shared-memory addresses as the 32-bit numbers that PTX instructions take.
#pragma once
#include "flashpage/common/types.h"

namespace flashpage::ptx {

FP_DEVICE u32 shared_address(const void* pointer) { return static_cast<u32>(__cvta_generic_to_shared(pointer)); }

// The same value, but the compiler cannot tell: what is derived from it is computed where it is used, not kept in
// registers.
FP_DEVICE u32 opaque(u32 value) {
  asm volatile("" : "+r"(value));
  return value;
}

}  // namespace flashpage::ptx
