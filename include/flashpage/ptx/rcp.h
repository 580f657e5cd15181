// Reciprocal on the special-function unit.
#pragma once
#include "flashpage/common/types.h"

namespace flashpage::ptx {

// 1 / x within 1 ulp, for normal x with a normal reciprocal: one instruction, no range checks.
FP_DEVICE float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace flashpage::ptx
