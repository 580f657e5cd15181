// Numbers from 0 to 15 with an fp32 scale for a token and head, whose last four bits are the zero point: vLLM's
// int4_per_token_head. An element is (number - zero point) * scale.
#pragma once
#include "flashpage/formats/format.h"

namespace flashpage {

// An fp32 scale whose last four bits hold the zero point.
struct ScaleWithZero {
  u32 bits;
};

struct Int4Token {
  static constexpr int bits = 4, scale_columns = whole_row;
  static constexpr bool has_zero = true;
  static constexpr float left_out = 1.f;
  using Scale = ScaleWithZero;

  FP_HOST_DEVICE static float number(u32 stored) { return static_cast<float>(static_cast<i32>(stored)); }
  FP_HOST_DEVICE static float factor(Scale scale) { return float_of_bits(scale.bits & ~15u); }
  FP_HOST_DEVICE static float zero(Scale scale) { return number(scale.bits & 15); }

  // The range includes 0, so that the zero point is one of the numbers.
  FP_HOST_DEVICE static Scale scale_for(float least, float most) {
    least = least > 0.f ? 0.f : least;
    most = most < 0.f ? 0.f : most;
    const u32 factor_bits = bits_of_float(divided_by<15>(most - least)) & ~15u;
    const float by = float_of_bits(factor_bits);
    return {factor_bits | (by > 0.f ? static_cast<u32>(nearest_whole(rounded_quotient(-least, by))) & 15 : 0)};
  }
  FP_HOST_DEVICE static u32 stored(float element, Scale scale) {
    const float by = factor(scale), x = by > 0.f ? nearest_whole(rounded_quotient(element, by)) + zero(scale) : 0.f;
    return static_cast<u32>(x > 0.f ? at_most(x, 15.f) : 0.f);
  }

  // widen<Half> minus `zeros`, a pair of zero_bits.
  static constexpr float half_left_out = 1.f;
  FP_DEVICE static u32 zero_bits(u32 scale) { return scale & 15; }
  template <class Wide>
  FP_DEVICE static void widen(u32 word, u32 zeros, u32 (&pairs)[4]) {
    static_assert(is_same<Wide, Half>);
    constexpr u32 one = 0x3c003c00, sixteenth = 0x2c002c00, large = 0x64006400;
    const u32 minus_1024 = 0xe400e400 | zeros, minus_64 = 0xd400d400 | zeros << 4, later = word >> 8;
    pairs[0] = ptx::fma_half2((word & 0x000f000f) | large, one, minus_1024);
    pairs[1] = ptx::fma_half2((word & 0x00f000f0) | large, sixteenth, minus_64);
    pairs[2] = ptx::fma_half2((later & 0x000f000f) | large, one, minus_1024);
    pairs[3] = ptx::fma_half2((later & 0x00f000f0) | large, sixteenth, minus_64);
  }

  // A number is the end of the mantissa of 1024 (fp16) or 128 (bf16); numbers four bits further up are 16 times as
  // large there, where the type has room for them.
  template <class Wide>
  FP_DEVICE static void widen(u32 word, u32 (&pairs)[4]) {
    if constexpr (is_same<Wide, Half>) {
      constexpr u32 one = 0x3c003c00, sixteenth = 0x2c002c00, large = 0x64006400;
      constexpr u32 minus_1024 = 0xe400e400, minus_64 = 0xd400d400;
      const u32 later = word >> 8;
      pairs[0] = ptx::fma_half2((word & 0x000f000f) | large, one, minus_1024);
      pairs[1] = ptx::fma_half2((word & 0x00f000f0) | large, sixteenth, minus_64);
      pairs[2] = ptx::fma_half2((later & 0x000f000f) | large, one, minus_1024);
      pairs[3] = ptx::fma_half2((later & 0x00f000f0) | large, sixteenth, minus_64);
    } else {
      constexpr u32 one = 0x3f803f80, large = 0x43004300, minus_128 = 0xc300c300;
      for (int i = 0; i < 4; ++i) pairs[i] = ptx::fma_bf162((word >> 4 * i & 0x000f000f) | large, one, minus_128);
    }
  }
  template <int count>
  FP_DEVICE static void pack(u32 (&words)[1], const float (&elements)[count], Scale scale) {
    const float by = factor(scale);
    words[0] = ptx::pack_uint4(elements, by > 0.f ? ptx::reciprocal_approx(by) : 0.f, by > 0.f ? zero(scale) : 0.f);
  }
};

}  // namespace flashpage
