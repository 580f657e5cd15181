// Stores matrices to shared memory, row by row of 16 bytes.
#pragma once
#include "hopper.h"

namespace flashpage::ptx {

inline void stmatrix_x4(u32 shared, const u32 (&r)[4]) {
  const auto rows = hopper::of_lanes(shared);
  const int lane = threadIdx.x % 32;
  for (int matrix = 0; matrix < 4; ++matrix)
    std::memcpy(hopper::at(rows[matrix * 8 + lane / 4]) + lane % 4 * 4, &r[matrix], sizeof r[matrix]);
}

inline void stmatrix_x4_trans(u32 shared, const u32 (&r)[4]) {
  const auto rows = hopper::of_lanes(shared);
  const int lane = threadIdx.x % 32;
  for (int matrix = 0; matrix < 4; ++matrix)
    for (int i = 0; i < 2; ++i) {
      const u16 element = static_cast<u16>(r[matrix] >> 16 * i);
      std::memcpy(hopper::at(rows[matrix * 8 + lane % 4 * 2 + i]) + lane / 4 * 2, &element, sizeof element);
    }
}

}  // namespace flashpage::ptx
