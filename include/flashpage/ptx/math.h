// exp2, log2, tanh, sine and cosine on the special-function unit.
#pragma once
#include "flashpage/common/types.h"

namespace flashpage::ptx {

FP_DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

FP_DEVICE float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Relative error at most 2^-11.
FP_DEVICE float tanh_approx(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Error at most 2^-21 from -pi to pi.
FP_DEVICE float sin_approx(float x) {
  float y;
  asm("sin.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

FP_DEVICE float cos_approx(float x) {
  float y;
  asm("cos.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

FP_DEVICE float negative_infinity() { return __int_as_float(0xff800000); }

}  // namespace flashpage::ptx
