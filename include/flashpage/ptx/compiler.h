// Hints to the compiler that become no instruction.
//
// Accumulators take most registers of these kernels. Any other value that stays in a register from tile to tile costs a
// spill, or makes ptxas serialise the wgmmas (warning C7511). The compiler does not weigh this: it keeps values that it
// has computed once, and hoists computations out of loops.
#pragma once
#include "flashpage/common/types.h"

namespace flashpage::ptx {

// Returns `value`, but hides from the compiler that it is the same, so that values derived from it are computed where
// they are used.
FP_DEVICE u32 opaque(u32 value) {
  asm volatile("" : "+r"(value));
  return value;
}

// As opaque, but only for compute capabilities (times ten) from `least` on, where ptxas takes more registers; for
// earlier ones the code stays as it was measured.
template <int least>
FP_DEVICE u32 opaque_from(u32 value) {
#if defined(__CUDA_ARCH__)
  if constexpr (__CUDA_ARCH__ >= least * 10) return opaque(value);
#endif
  return value;
}

// Marks accumulators as dead. Called before a branch, as the compiler would otherwise keep them alive on both sides.
template <int tiles>
FP_DEVICE void forget(float (&accumulators)[tiles][4]) {
  float unset[tiles][4];
#pragma unroll
  for (int n = 0; n < tiles; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) accumulators[n][e] = unset[n][e];
}

}  // namespace flashpage::ptx
