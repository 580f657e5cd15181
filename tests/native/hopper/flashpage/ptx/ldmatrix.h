// Loads matrices from shared memory, row by row of 16 bytes.
#pragma once
#include "hopper.h"

namespace flashpage::ptx {

inline void ldmatrix_x4(u32 (&r)[4], u32 shared) {
  const auto rows = hopper::of_lanes(shared);
  const int lane = threadIdx.x % 32;
  for (int matrix = 0; matrix < 4; ++matrix)
    std::memcpy(&r[matrix], hopper::at(rows[matrix * 8 + lane / 4]) + lane % 4 * 4, sizeof r[matrix]);
}
inline void ldmatrix_x4_trans(u32 (&r)[4], u32 shared) {
  const auto rows = hopper::of_lanes(shared);
  const int lane = threadIdx.x % 32;
  for (int matrix = 0; matrix < 4; ++matrix) {
    u16 elements[2];
    for (int i = 0; i < 2; ++i)
      std::memcpy(&elements[i], hopper::at(rows[matrix * 8 + lane % 4 * 2 + i]) + lane / 4 * 2, sizeof elements[i]);
    r[matrix] = elements[0] | elements[1] << 16;
  }
}

}  // namespace flashpage::ptx
