// Shared-memory addresses as the 32-bit numbers that PTX instructions take.
#pragma once
#include "flashpage/common/types.h"

namespace flashpage::ptx {

FP_DEVICE u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

}  // namespace flashpage::ptx
