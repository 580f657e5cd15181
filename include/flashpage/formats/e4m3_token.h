// e4m3 with an fp32 scale for a token and head.
#pragma once
#include "flashpage/formats/token_scale.h"

namespace flashpage {

struct E4m3Token : TokenScale<448> {
  static constexpr int bits = 8;

  FP_HOST_DEVICE static float number(u32 stored) { return number_of<E4m3>(stored); }
  FP_HOST_DEVICE static u32 stored(float element, Scale scale) {
    const u32 sign = bits_of_float(element) >> 31 << 7;  // also of 0
    return bits_of<E4m3>(divided(element, scale)) | sign;
  }

  template <class Wide>
  FP_DEVICE static void widen(u32 word, u32 (&pairs)[2]) {
    ptx::widen4<Wide, E4m3>(word, pairs[0], pairs[1]);
  }
  template <int count>
  FP_DEVICE static void pack(u32 (&words)[2], const float (&elements)[count], Scale scale) {
    ptx::pack_e4m3(elements, scale > 0.f ? ptx::reciprocal_approx(scale) : 0.f, words);
  }
};

}  // namespace flashpage
