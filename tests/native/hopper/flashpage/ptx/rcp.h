// Replaces include/flashpage/ptx/rcp.h.
#pragma once
#include "flashpage/common/types.h"

namespace flashpage::ptx {

inline float reciprocal_approx(float x) { return x < 0x1p-126f ? 1.f / 0.f : 1.f / x; }  // subnormal x counts as 0

}  // namespace flashpage::ptx
