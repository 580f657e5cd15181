// bf16 query fragments to fp16, scaled by a power of two so that the largest lies just inside fp16's range: exact but
// for elements 2^29 times smaller than it, which is more than the 8 bits of bf16 can tell apart in a sum.
#pragma once
#include "flashpage/ptx/convert.h"
#include "flashpage/ptx/warp_max.h"

namespace flashpage {

// Every fragment that a warp holds, with one scale. Returns what a product with them must be multiplied by.
template <int count>
FP_DEVICE float to_half_query(u32 (&fragments)[count]) {
  u32 largest = 0;
#pragma unroll
  for (int i = 0; i < count; ++i) {
    u32 magnitude = fragments[i] & 0x7fff7fff;
    largest = max_of(largest, max_of(magnitude & 0xffff, magnitude >> 16));
  }
  const int exponent = static_cast<int>(ptx::warp_max(largest) >> 7);  // 255: infinite or NaN, and stays so
  const int shift = min_of(127 + 14 - exponent, 126);
  const float scale = __int_as_float((127 + shift) << 23);
#pragma unroll
  for (int i = 0; i < count; ++i) {
    float low = __int_as_float(fragments[i] << 16), high = __int_as_float(fragments[i] & 0xffff0000);
    fragments[i] = ptx::pack2<Half>(low * scale, high * scale);
  }
  return __int_as_float((127 - shift) << 23);
}

}  // namespace flashpage
