// mma.sync by the fragments of the PTX manual.
#pragma once
#include "flashpage/ptx/convert.h"

namespace flashpage::ptx {

// Sums of the products of 32 bytes of each row: 16 or 32 terms.
template <class Element>
void mma_m16n8(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  struct Fragments {
    u32 a[4], b[2];
  };
  constexpr int bits = 8 * sizeof(Element), together = 32 / bits, terms = 8 * together;
  static std::array<std::array<Fragments, 32>, 32> of_warps;
  auto& lanes = of_warps[card::fiber / 32];
  const int lane = threadIdx.x % 32;
  lanes[lane] = {{a[0], a[1], a[2], a[3]}, {b0, b1}};
  const auto number = [](u32 word, int k) {
    const u32 element = word >> bits * (k % together) & ((1ull << bits) - 1);
    if constexpr (is_same<Element, E4m3>) {
      return hopper::of_e4m3(element);
    } else {
      return is_same<Element, Half> ? hopper::of_half(element) : hopper::of_bf16(element);
    }
  };
  __syncwarp();
  for (int e = 0; e < 4; ++e) {
    const int row = lane / 4, column = lane % 4 * 2 + e % 2;
    float sum = 0.f;
    for (int k = 0; k < terms; ++k) {
      const int half = k / (terms / 2), quarter = k % (terms / 2) / together;  // register and lane of the quad
      sum += number(lanes[row * 4 + quarter].a[e / 2 + half * 2], k) * number(lanes[column * 4 + quarter].b[half], k);
    }
    c[e] += sum;
  }
  __syncwarp();
}
template <class Element>
void mma_m16n8k16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  static_assert(sizeof(Element) == 2);
  mma_m16n8<Element>(c, a, b0, b1);
}
template <class Element>
void mma_m16n8k32(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  static_assert(sizeof(Element) == 1);
  mma_m16n8<Element>(c, a, b0, b1);
}

}  // namespace flashpage::ptx
