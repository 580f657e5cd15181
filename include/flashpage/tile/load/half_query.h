// Converts bf16 queries to fp16, scaled by a power of two so that the largest is just inside fp16's range. This is
// exact except for elements 2^29 times smaller than the largest, which do not affect a sum of bf16 numbers.
#pragma once
#include "flashpage/ptx/convert.h"
#include "flashpage/ptx/warp_max.h"

namespace flashpage {

// The maximum of `largest` and the magnitudes of a pair, as bits.
FP_DEVICE u32 raise_magnitude(u32 largest, u32 pair) {
  u32 magnitude = pair & 0x7fff7fff;
  return max_of(largest, max_of(magnitude & 0xffff, magnitude >> 16));
}

// One scale for all elements that a warp holds.
struct HalfScale {
  int shift;
  float scale;

  // `largest`: raise_magnitude of all pairs of the lane.
  FP_DEVICE explicit HalfScale(u32 largest) {
    const int exponent = static_cast<int>(ptx::warp_max(largest) >> 7);  // 255: infinite or NaN, which stays so
    shift = min_of(127 + 14 - exponent, 126);
    scale = __int_as_float((127 + shift) << 23);
  }
  // The factor of the products that undoes the scale.
  FP_DEVICE float factor() const { return __int_as_float((127 - shift) << 23); }
  FP_DEVICE u32 of(u32 pair) const {
    float low = __int_as_float(pair << 16), high = __int_as_float(pair & 0xffff0000);
    return ptx::pack2<Half>(low * scale, high * scale);
  }
};

// Converts all fragments that a warp holds and returns the factor of their products.
template <int count>
FP_DEVICE float to_half_query(u32 (&fragments)[count]) {
  u32 largest = 0;
#pragma unroll
  for (int i = 0; i < count; ++i) largest = raise_magnitude(largest, fragments[i]);
  const HalfScale scale(largest);
#pragma unroll
  for (int i = 0; i < count; ++i) fragments[i] = scale.of(fragments[i]);
  return scale.factor();
}

}  // namespace flashpage
