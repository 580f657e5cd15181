// Rounds eight numbers at a time to 4 or 8 bits, for appends that quantise. Each is multiplied by `factor` first, the
// inverse of a scale; the first number comes to the lowest bits.
#pragma once
#include "flashpage/ptx/convert.h"

namespace flashpage::ptx {

// Rounds a pair to e2m1, which come to the highest four bits of each half; the bits below are arbitrary. Numbers beyond
// 6 become 6. 2^-14 times an fp16 has e2m1's exponents, subnormal ones included, so that rounding the fp16 to its
// highest bit of the mantissa rounds the number. A number 2^-11 of itself from the middle of two e2m1 may become
// either, because it is rounded to fp16 before.
FP_DEVICE u32 round_e2m1(float low, float high, float factor) {
  const u32 pair = pack2<Half>(low * (factor * 0x1p-14f), high * (factor * 0x1p-14f));
  const u32 magnitudes = min_half2(pair & 0x7fff7fff, 0x0e000e00);
  const u32 rounded = magnitudes + 0x00ff00ff + ((magnitudes >> 9) & 0x00010001);
  return (pair & 0x8fff8fff) | ((rounded << 3) & 0x70007000);
}
FP_DEVICE u32 pack_e2m1(const float (&numbers)[8], float factor) {
  u32 pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) pairs[i] = round_e2m1(numbers[2 * i], numbers[2 * i + 1], factor);
  const u32 first = byte_permute(pairs[0], pairs[1], 0x7531), last = byte_permute(pairs[2], pairs[3], 0x7531);
  const u32 even = byte_permute(first, last, 0x6420), odd = byte_permute(first, last, 0x7531);
  return ((even >> 4) & 0x0f0f0f0f) | (odd & 0xf0f0f0f0);
}

// 1.5 * 2^23: a number below 2^22 that is added to it is rounded to an integer, which is the low bits of the sum.
inline constexpr float rounding_integer = 12582912.f;

// Signed bytes; `factor` brings all numbers to at most 127.
FP_DEVICE void pack_int8(const float (&numbers)[8], float factor, u32 (&words)[2]) {
  u32 bits[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) bits[i] = __float_as_uint(fmaf(numbers[i], factor, rounding_integer));
#pragma unroll
  for (int i = 0; i < 2; ++i)
    words[i] = byte_permute(byte_permute(bits[4 * i], bits[4 * i + 1], 0x0040),
                            byte_permute(bits[4 * i + 2], bits[4 * i + 3], 0x0040), 0x5410);
}

// Unsigned numbers of four bits: `zero` is added after the factor.
FP_DEVICE u32 pack_uint4(const float (&numbers)[8], float factor, float zero) {
  u32 packed = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float number = fminf(fmaxf(fmaf(numbers[i], factor, zero), 0.f), 15.f);
    packed |= (__float_as_uint(number + rounding_integer) & 0xf) << 4 * i;
  }
  return packed;
}

// e4m3; numbers that are too large become the largest one.
FP_DEVICE void pack_e4m3(const float (&numbers)[8], float factor, u32 (&words)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float* four = numbers + 4 * i;
    words[i] = narrow4<E4m3>(four[0] * factor, four[1] * factor, four[2] * factor, four[3] * factor);
  }
}

}  // namespace flashpage::ptx
