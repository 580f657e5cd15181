// Scales of tokens (formats/format.h) on the way from scores to probabilities: those of K multiply scores, those of V
// probabilities, so that elements are multiplied as they are stored.
#pragma once
#include "flashpage/ptx/shared.h"
#include "flashpage/tile/softmax/softmax.h"

namespace flashpage {

// The factors of this lane's two tokens of an n8 tile. `scales`: shared address of the scales of the tile's first
// token.
template <class Format>
FP_DEVICE float2 token_factors(u32 scales, int tile, int lane) {
  using Scale = typename Format::Scale;
  static_assert(sizeof(Scale) == 4);
  u32 bits[2];
  ptx::load_shared(bits, scales + (tile * 8 + lane % 4 * 2) * 4);
  return make_float2(Format::factor(__builtin_bit_cast(Scale, bits[0])),
                     Format::factor(__builtin_bit_cast(Scale, bits[1])));
}

template <class Format, int token_tiles>
FP_DEVICE void scale_scores(float (&scores)[1][token_tiles][4], u32 scales, int lane) {
#pragma unroll
  for (int n = 0; n < token_tiles; ++n) {
    const float2 factors = token_factors<Format>(scales, n, lane);
#pragma unroll
    for (int e = 0; e < 4; ++e) scores[0][n][e] *= e % 2 ? factors.y : factors.x;
  }
}

// Probabilities are multiplied by scales divided by `unit`, a power of two near the largest scale so far, so that fp16
// has room for the products. Values are sums relative to it, as they are relative to the maximum of scores.
struct ScaledProbabilities {
  static constexpr float headroom = 128.f;
  float unit = 0.f;

  template <class Format, int token_tiles, int value_tiles>
  FP_DEVICE void scale(float (&probabilities)[1][token_tiles][4], float (&values)[1][value_tiles][4], u32 scales,
                       int lane) {
    float top = 0.f;
#pragma unroll
    for (int n = 0; n < token_tiles; ++n) {
      const float2 factors = token_factors<Format>(scales, n, lane);
      top = fmaxf(top, fmaxf(fabsf(factors.x), fabsf(factors.y)));
    }
    if (__any_sync(0xffffffff, top > unit * headroom)) {
      const float next = unit_of(quad_max(top));
      const float factor = unit * inverse(next);
#pragma unroll
      for (int n = 0; n < value_tiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) values[0][n][e] *= factor;
      unit = next;
    }
    const float by = unit > 0.f ? inverse(unit) : 0.f;
#pragma unroll
    for (int n = 0; n < token_tiles; ++n) {
      const float2 factors = token_factors<Format>(scales, n, lane);  // again: they would take registers
#pragma unroll
      for (int e = 0; e < 4; ++e) probabilities[0][n][e] *= (e % 2 ? factors.y : factors.x) * by;
    }
  }

  FP_DEVICE static float unit_of(float largest) {
    constexpr u32 smallest = 0x08000000;  // 2^-111
    return __uint_as_float(max_of(__float_as_uint(largest) & 0x7f800000, smallest));
  }
  // Of a power of two from 2^-111 to 2^126.
  FP_DEVICE static float inverse(float power) { return __uint_as_float((254u << 23) - __float_as_uint(power)); }
};

}  // namespace flashpage
