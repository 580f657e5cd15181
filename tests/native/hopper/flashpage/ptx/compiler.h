// Accumulators that are marked as dead become NaN.
#pragma once
#include <limits>

#include "hopper.h"

namespace flashpage::ptx {

inline u32 opaque(u32 value) { return value; }

template <int least>
u32 opaque_from(u32 value) {
  return value;
}

template <int tiles>
void forget(float (&accumulators)[tiles][4]) {
  for (auto& tile : accumulators)
    for (float& value : tile) value = std::numeric_limits<float>::quiet_NaN();
}

}  // namespace flashpage::ptx
