// Element types to floats and back, one number at a time, with the same bits on the host and on cards. Rounding is to
// nearest even, and numbers that are too large become the largest one.
#pragma once
#include "flashpage/common/types.h"

namespace flashpage {

// ptx/convert.h, which the CPU does not have.
namespace ptx {
FP_DEVICE float half_bits_to_float(u16 bits);
template <class Wide, class Narrow>
FP_DEVICE void widen4(u32 four, u32& pair0, u32& pair1);
template <class Narrow>
FP_DEVICE Narrow narrow(float value);
}  // namespace ptx

FP_HOST_DEVICE float float_of_bits(u32 bits) { return __builtin_bit_cast(float, bits); }
FP_HOST_DEVICE u32 bits_of_float(float number) { return __builtin_bit_cast(u32, number); }

FP_HOST_DEVICE float nearest_whole(float x) {
#if defined(__CUDA_ARCH__)
  return rintf(x);
#else
  return __builtin_rintf(x);
#endif
}
// As it stands: compilers for cards would make one fma of a product and a sum.
FP_HOST_DEVICE float rounded_product(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}
FP_HOST_DEVICE float rounded_quotient(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}
// x / divisor, and 0 in place of a subnormal quotient, of which cards take no reciprocal. On cards by the divisor's
// inverse, and what is left to divide by the inverse again, which rounds as a division does.
template <int divisor>
FP_HOST_DEVICE float divided_by(float x) {
  constexpr float smallest = 0x1p-126f;
#if defined(__CUDA_ARCH__)
  constexpr float inverse = 1.f / divisor;
  const float near = x * inverse;
  const float quotient = __fmaf_rn(__fmaf_rn(-near, static_cast<float>(divisor), x), inverse, near);
#else
  const float quotient = x / divisor;
#endif
  return quotient < smallest ? 0.f : quotient;
}
FP_HOST_DEVICE float magnitude_of(float x) { return float_of_bits(bits_of_float(x) & 0x7fffffff); }
// The larger one of two magnitudes; NaN is the largest.
FP_HOST_DEVICE float larger_magnitude(float a, float b) {
  const u32 bits_a = bits_of_float(a) & 0x7fffffff, bits_b = bits_of_float(b) & 0x7fffffff;
  return float_of_bits(bits_a > bits_b ? bits_a : bits_b);
}
FP_HOST_DEVICE float at_most(float x, float most) { return x > most ? most : x; }

// Fields of a small floating-point type without infinities of use here.
template <int exponent_bits, int mantissa_bits>
struct SmallFloat {
  static constexpr int bias = (1 << (exponent_bits - 1)) - 1;

  FP_HOST_DEVICE static float number(u32 stored) {
    const u32 exponent = stored >> mantissa_bits & ((1 << exponent_bits) - 1);
    const u32 mantissa = stored & ((1 << mantissa_bits) - 1);
    const u32 whole = exponent ? mantissa | 1 << mantissa_bits : mantissa;  // subnormal numbers have no leading one
    const float step = float_of_bits(((exponent ? exponent : 1) + 127 - bias - mantissa_bits) << 23);
    const float magnitude = static_cast<float>(whole) * step;
    return stored >> (exponent_bits + mantissa_bits) & 1 ? -magnitude : magnitude;
  }
  FP_HOST_DEVICE static u32 stored(float number, float largest) {
    const u32 sign = (bits_of_float(number) >> 31) << (exponent_bits + mantissa_bits);
    const float magnitude = at_most(magnitude_of(number), largest);
    constexpr float steps = 1.f / (1 << (bias - 1)) / (1 << mantissa_bits);  // distance of subnormal numbers
    if (magnitude < steps * (1 << mantissa_bits)) return sign | static_cast<u32>(nearest_whole(magnitude / steps));
    constexpr int dropped = 23 - mantissa_bits;
    const u32 wide = bits_of_float(magnitude);
    const u32 narrow = (wide + (1u << (dropped - 1)) - 1 + (wide >> dropped & 1)) >> dropped;
    return sign | (narrow - ((127 - bias) << mantissa_bits));
  }
};

// The number that the bits of an element stand for.
template <class Element>
FP_HOST_DEVICE float number_of(u32 stored) {
  if constexpr (is_same<Element, float>) return float_of_bits(stored);
  if constexpr (is_same<Element, Bf16>) return float_of_bits(stored << 16);
#if defined(__CUDA_ARCH__)
  if constexpr (is_same<Element, E4m3>) {
    u32 pair, other;
    ptx::widen4<Half, E4m3>(stored, pair, other);
    return ptx::half_bits_to_float(static_cast<u16>(pair));
  }
#endif
  if constexpr (is_same<Element, E4m3>)
    return (stored & 0x7f) == 0x7f ? float_of_bits(0x7fffffff) : SmallFloat<4, 3>::number(stored);
  constexpr bool is_half = is_same<Element, Half>;
  if constexpr (is_half || is_same<Element, E5m2>) {
    const u32 half = is_half ? stored : stored << 8;
    if ((half & 0x7c00) != 0x7c00) return SmallFloat<5, 10>::number(half);
    return float_of_bits((half & 0x8000) << 16 | 0x7f800000 | (half & 0x3ff) << 13);  // infinities and NaN
  }
}

// The bits of the nearest element; NaN stays NaN.
template <class Element>
FP_HOST_DEVICE u32 bits_of(float number) {
  const u32 wide = bits_of_float(number);
  const bool is_nan = number != number;
  if constexpr (is_same<Element, float>) return wide;
  if constexpr (is_same<Element, Bf16>) return is_nan ? 0x7fff : (wide + 0x7fff + (wide >> 16 & 1)) >> 16;
  if constexpr (is_same<Element, Half>) return is_nan ? 0x7fff : SmallFloat<5, 10>::stored(number, 65504.f);
#if defined(__CUDA_ARCH__)
  if constexpr (is_same<Element, E4m3>) return ptx::narrow<E4m3>(number).bits;
#endif
  if constexpr (is_same<Element, E4m3>) return is_nan ? 0x7f : SmallFloat<4, 3>::stored(number, 448.f);
  if constexpr (is_same<Element, E5m2>) return is_nan ? 0x7f : SmallFloat<5, 2>::stored(number, 57344.f);
}

}  // namespace flashpage
