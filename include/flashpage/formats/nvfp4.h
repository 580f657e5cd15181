// NVFP4: numbers of e2m1 (0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives), an e4m3 scale for 16 columns, and one float
// scale for the tensor, which is the run's k_scale or v_scale.
#pragma once
#include "flashpage/formats/format.h"

namespace flashpage {

struct Nvfp4 {
  static constexpr int bits = 4, scale_columns = 16;
  static constexpr bool has_zero = false;
  using Scale = E4m3;

  FP_HOST_DEVICE static float number(u32 stored) {
    const u32 exponent = stored >> 1 & 3, mantissa = stored & 1;
    const i32 halves = exponent ? (2 + mantissa) << (exponent - 1) : mantissa;
    return static_cast<float>(stored & 8 ? -halves : halves) * 0.5f;
  }
  FP_HOST_DEVICE static float factor(Scale scale) { return number_of<E4m3>(scale.bits); }
  FP_HOST_DEVICE static float zero(Scale) { return 0.f; }

  FP_HOST_DEVICE static Scale scale_for(float least, float most) {
    return {static_cast<u8>(bits_of<E4m3>(divided_by<6>(larger_magnitude(least, most))))};
  }
  FP_HOST_DEVICE static u32 stored(float element, Scale scale) {
    const float by = factor(scale), x = by > 0.f ? rounded_quotient(magnitude_of(element), by) : 0.f;
    // Counts the midpoints below x; a midpoint itself belongs to the neighbour whose last bit is 0.
    const u32 magnitude =
        (x > 0.25f) + (x >= 0.75f) + (x > 1.25f) + (x >= 1.75f) + (x > 2.5f) + (x >= 3.5f) + (x > 5.f);
    return (bits_of_float(element) >> 31) << 3 | magnitude;
  }

  // A number's three bits are the last ones of an exponent and the first one of a mantissa, and its sign is a sign: the
  // wider type reads it as 2^-14 times (fp16) or 2^-126 times (bf16) the number, subnormal ones too. scale_pair has all
  // of that factor's inverse but 2^7, so that the largest scale is within the type.
  static constexpr float left_out = 128.f;

  // Four scales as two pairs of fp16, without the inverse of widen<Half>'s 2^-14. Both are exact, and so is their
  // product.
  static constexpr float half_left_out = 16384.f;
  FP_DEVICE static void scale_halves(u32 four, u32& first, u32& second) {
    ptx::widen4<Half, E4m3>(four, first, second);
  }

  template <class Wide>
  FP_DEVICE static void widen(u32 word, u32 (&pairs)[4]) {
    if constexpr (is_same<Wide, Half>) {
      // In the first byte of an fp16 each number has all of its bits, so two steps convert four numbers.
      const u32 even = (word << 4 & 0x80808080) | (word << 1 & 0x0e0e0e0e);
      const u32 odd = (word & 0x80808080) | (word >> 3 & 0x0e0e0e0e);
      pairs[0] = ptx::byte_permute(even, 0, 0x2404);
      pairs[1] = ptx::byte_permute(odd, 0, 0x2404);
      pairs[2] = even & 0xff00ff00;
      pairs[3] = odd & 0xff00ff00;
      return;
    }
    constexpr int shift = 6;  // from a number's last bit to the first bit of a mantissa
    constexpr u32 magnitudes = 0x00070007u << shift, signs = 0x80008000;
    pairs[0] = (word << shift & magnitudes) | (word << 12 & signs);
    pairs[1] = (shifted<shift - 4>(word) & magnitudes) | (word << 8 & signs);
    pairs[2] = (shifted<shift - 8>(word) & magnitudes) | (word << 4 & signs);
    pairs[3] = (shifted<shift - 12>(word) & magnitudes) | (word & signs);
  }
  // The factor of a pair's elements: the scale, times 2^7 (fp16) or 2^119 (bf16).
  template <class Wide>
  FP_DEVICE static u32 scale_pair(Scale scale) {
    const u32 four = scale.bits | static_cast<u32>(scale.bits) << 8;
    u32 pair, other;
    ptx::widen4<Wide, E4m3>(four, pair, other);
    constexpr bool is_half = is_same<Wide, Half>;
    return is_half ? ptx::mul_half2(pair, 0x58005800) : ptx::mul_bf162(pair, 0x7b007b00);
  }
  template <int count>
  FP_DEVICE static void pack(u32 (&words)[1], const float (&elements)[count], Scale scale) {
    const float by = factor(scale);
    words[0] = ptx::pack_e2m1(elements, by > 0.f ? ptx::reciprocal_approx(by) : 0.f);
  }

 private:
  template <int left>
  FP_DEVICE static u32 shifted(u32 word) {
    return left >= 0 ? word << (left & 31) : word >> (-left & 31);
  }
};

}  // namespace flashpage
