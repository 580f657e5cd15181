// mma.sync by the fragments of the PTX manual.
#pragma once
#include "flashpage/ptx/convert.h"

namespace flashpage::ptx {

template <class Element>
void mma_m16n8k16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  struct Fragments {
    u32 a[4], b[2];
  };
  static std::array<std::array<Fragments, 32>, 32> of_warps;
  auto& lanes = of_warps[card::fiber / 32];
  const int lane = threadIdx.x % 32;
  lanes[lane] = {{a[0], a[1], a[2], a[3]}, {b0, b1}};
  const auto number = [](u32 pair, int k) {
    const u32 bits = pair >> 16 * (k % 2) & 0xffff;
    return is_same<Element, Half> ? hopper::of_half(bits) : hopper::of_bf16(bits);
  };
  __syncwarp();
  for (int e = 0; e < 4; ++e) {
    const int row = lane / 4, column = lane % 4 * 2 + e % 2;
    float sum = 0.f;
    for (int k = 0; k < 16; ++k)
      sum += number(lanes[row * 4 + k % 8 / 2].a[e / 2 + k / 8 * 2], k) *
             number(lanes[column * 4 + k % 8 / 2].b[k / 8], k);
    c[e] += sum;
  }
  __syncwarp();
}

}  // namespace flashpage::ptx
