// Replaces include/flashpage/ptx/rcp.h.
#pragma once
#include "flashpage/common/types.h"

namespace flashpage::ptx {

inline float reciprocal_approx(float x) { return 1.f / x; }

}  // namespace flashpage::ptx
