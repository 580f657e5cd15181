// Transposes a matrix of a warp.
#pragma once
#include "hopper.h"

namespace flashpage::ptx {

inline u32 transpose_matrix(u32 pair) {
  const auto rows = hopper::of_lanes(pair);
  const int lane = threadIdx.x % 32, column = lane / 4, shift = column % 2 * 16;
  u32 transposed = 0;
  for (int i = 0; i < 2; ++i) transposed |= (rows[(lane % 4 * 2 + i) * 4 + column / 2] >> shift & 0xffff) << 16 * i;
  return transposed;
}

}  // namespace flashpage::ptx
