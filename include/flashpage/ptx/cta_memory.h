// A CTA's dynamic shared memory as a struct.
#pragma once
#include "flashpage/common/types.h"

namespace flashpage::ptx {

template <class Shared>
FP_DEVICE Shared& cta_memory() {
  extern __shared__ __align__(1024) u8 memory[];
  return *reinterpret_cast<Shared*>(memory);
}

}  // namespace flashpage::ptx
