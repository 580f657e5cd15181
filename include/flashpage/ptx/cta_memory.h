// A CTA's dynamic shared memory as a struct.
#pragma once
#include "flashpage/common/types.h"

namespace flashpage::ptx {

extern "C" __shared__ __align__(1024) u8 flashpage_memory[];

template <class Shared>
FP_DEVICE Shared& cta_memory() {
  return *reinterpret_cast<Shared*>(flashpage_memory);
}

}  // namespace flashpage::ptx
