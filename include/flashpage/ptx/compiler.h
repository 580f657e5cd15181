// What is said to the compiler alone and becomes no instruction.
//
// Accumulators take most registers of these kernels. Whatever else stays in one from tile to tile costs a spill, or has
// ptxas put products one after the other (C7511). The compiler does not weigh that: it keeps what it has computed once,
// and what it could compute before a loop.
#pragma once
#include "flashpage/common/types.h"

namespace flashpage::ptx {

// The same value, but the compiler cannot tell: what is derived from it is computed where it is used.
FP_DEVICE u32 opaque(u32 value) {
  asm volatile("" : "+r"(value));
  return value;
}

// What these hold is of no use any more. Said where ways part: else it would be kept through both.
template <int tiles>
FP_DEVICE void forget(float (&accumulators)[tiles][4]) {
  float unset[tiles][4];
#pragma unroll
  for (int n = 0; n < tiles; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) accumulators[n][e] = unset[n][e];
}

}  // namespace flashpage::ptx
