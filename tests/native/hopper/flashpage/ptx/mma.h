// Only declared: used by kernels that do not run on the host.
#pragma once
#include "flashpage/common/types.h"

namespace flashpage::ptx {

template <class Element>
void mma_m16n8k16(float (&)[4], const u32 (&)[4], u32, u32);

}  // namespace flashpage::ptx
