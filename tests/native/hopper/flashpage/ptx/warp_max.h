// The largest number of a warp's lanes.
#pragma once
#include "hopper.h"

namespace flashpage::ptx {

inline u32 warp_max(u32 x) {
  const auto all = hopper::of_lanes(x);
  return *std::max_element(all.begin(), all.end());
}
inline float warp_max(float x) {
  float most = x;
  for (const u32 bits : hopper::of_lanes(std::bit_cast<u32>(x))) most = std::fmax(most, std::bit_cast<float>(bits));
  return most;
}

}  // namespace flashpage::ptx
