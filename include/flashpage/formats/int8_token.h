// Signed bytes with an fp32 scale for a token and head.
#pragma once
#include "flashpage/formats/token_scale.h"

namespace flashpage {

struct Int8Token : TokenScale<127> {
  static constexpr int bits = 8;

  FP_HOST_DEVICE static float number(u32 stored) { return static_cast<float>(static_cast<i8>(stored)); }
  FP_HOST_DEVICE static u32 stored(float element, Scale scale) {
    return static_cast<u32>(static_cast<i32>(nearest_whole(divided(element, scale)))) & 0xff;
  }

  // With 128 added, a byte is the mantissa of 1024 and more in fp16. bf16 has room for seven of its bits, after 128:
  // what is taken off is 128 or 256.
  template <class Wide>
  FP_DEVICE static void widen(u32 word, u32 (&pairs)[2]) {
    const u32 positive = word ^ 0x80808080;
    if constexpr (is_same<Wide, Half>) {
      constexpr u32 one = 0x3c003c00, minus_1152 = 0xe480e480;
      pairs[0] = ptx::fma_half2(ptx::byte_permute(positive, 0x64646464, 0x4140), one, minus_1152);
      pairs[1] = ptx::fma_half2(ptx::byte_permute(positive, 0x64646464, 0x4342), one, minus_1152);
    } else {
      pairs[0] = to_bf16(ptx::byte_permute(positive, 0, 0x4140));
      pairs[1] = to_bf16(ptx::byte_permute(positive, 0, 0x4342));
    }
  }
  template <int count>
  FP_DEVICE static void pack(u32 (&words)[2], const float (&elements)[count], Scale scale) {
    ptx::pack_int8(elements, scale > 0.f ? ptx::reciprocal_approx(scale) : 0.f, words);
  }

 private:
  FP_DEVICE static u32 to_bf16(u32 bytes) {
    constexpr u32 one = 0x3f803f80;
    return ptx::fma_bf162((bytes & 0x007f007f) | 0x43004300, one, 0xc380c380 ^ (bytes & 0x00800080));
  }
};

}  // namespace flashpage
