// Conversions between fp32, 16-bit and 8-bit elements on the device. The low element of a pair comes first.
#pragma once
#include "flashpage/common/types.h"

namespace flashpage::ptx {

// Packs {low, high}, rounded to nearest even.
template <class T>
FP_DEVICE u32 pack2(float low, float high) {
  u32 packed;
  if constexpr (is_same<T, Half>) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    static_assert(is_same<T, Bf16>);
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}

// Packs four fp8 numbers (sm_89), rounded to nearest even; numbers that are too large become the largest one.
template <class T>
FP_DEVICE u32 pack4(float first, float second, float third, float fourth) {
  static_assert(is_same<T, E4m3>);
  u32 packed;
  asm("{\n.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n}"
      : "=r"(packed)
      : "f"(first), "f"(second), "f"(third), "f"(fourth));
  return packed;
}

template <class T>
FP_DEVICE T from_float(float value) {
  if constexpr (is_same<T, float>) {
    return value;
  } else {
    return T{static_cast<u16>(pack2<T>(value, 0.f))};
  }
}

FP_DEVICE float half_bits_to_float(u16 bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

template <class T>
FP_DEVICE float to_float(T value) {
  if constexpr (is_same<T, float>) {
    return value;
  } else if constexpr (is_same<T, Bf16>) {
    return __uint_as_float(static_cast<u32>(value.bits) << 16);
  } else if constexpr (is_same<T, Half>) {
    return half_bits_to_float(value.bits);
  } else if constexpr (is_same<T, E5m2>) {
    return half_bits_to_float(static_cast<u16>(value.bits << 8));
  } else {
    static_assert(is_same<T, E4m3>);
    // Moves the magnitude to fp16's fields; 2^8 makes up for the difference of the exponent biases. 0x7f is the only
    // NaN.
    u32 magnitude = value.bits & 0x7f;
    float scaled = half_bits_to_float(static_cast<u16>(magnitude << 7)) * 256.f;
    if (magnitude == 0x7f) scaled = __uint_as_float(0x7fffffff);
    return value.bits & 0x80 ? -scaled : scaled;
  }
}

// Unpacks {low, high} of 16-bit elements.
template <class T>
FP_DEVICE float2 unpack2(u32 packed) {
  if constexpr (is_same<T, Bf16>) {
    return make_float2(__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000));
  } else {
    static_assert(is_same<T, Half>);
    return make_float2(half_bits_to_float(static_cast<u16>(packed)),
                       half_bits_to_float(static_cast<u16>(packed >> 16)));
  }
}

FP_DEVICE u32 min_half2(u32 a, u32 b) {
  u32 least;
  asm("min.f16x2 %0, %1, %2;" : "=r"(least) : "r"(a), "r"(b));
  return least;
}

FP_DEVICE u32 byte_permute(u32 low, u32 high, u32 selector) { return __byte_perm(low, high, selector); }

FP_DEVICE u32 mul_half2(u32 a, u32 b) {
  u32 product;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

// a times one element of b, the first or the second.
FP_DEVICE u32 mul_half2_by(u32 a, u32 b, int second) {
  u32 product;
  if (second) {
    asm("{.reg .b16 low, high;\n .reg .b32 both;\n mov.b32 {low, high}, %2;\n mov.b32 both, {high, high};\n"
        " mul.rn.f16x2 %0, %1, both;}"
        : "=r"(product)
        : "r"(a), "r"(b));
  } else {
    asm("{.reg .b16 low, high;\n .reg .b32 both;\n mov.b32 {low, high}, %2;\n mov.b32 both, {low, low};\n"
        " mul.rn.f16x2 %0, %1, both;}"
        : "=r"(product)
        : "r"(a), "r"(b));
  }
  return product;
}

// fma_half2: a * b + c; negative_fma_half2: c - a * b.
FP_DEVICE u32 fma_half2(u32 a, u32 b, u32 c) {
  u32 sum;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
  return sum;
}
FP_DEVICE u32 negative_fma_half2(u32 a, u32 b, u32 c) {
  u32 difference;
  asm("{.reg .b32 n;\n neg.f16x2 n, %1;\n fma.rn.f16x2 %0, n, %2, %3;}" : "=r"(difference) : "r"(a), "r"(b), "r"(c));
  return difference;
}

FP_DEVICE u32 fma_bf162(u32 a, u32 b, u32 c) {
  u32 sum;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
  return sum;
}
FP_DEVICE u32 mul_bf162(u32 a, u32 b) {
  return fma_bf162(a, b, 0x80008000);  // sm_80 has no bf16 multiply
}

// Widens four fp8 bytes to two pairs of 16-bit elements, exactly for every finite value: the magnitude is shifted to
// the wider format's exponent and mantissa, and a power of two makes up for the difference of the exponent biases.
template <class Wide, class Narrow>
FP_DEVICE void widen4(u32 four, u32& pair0, u32& pair1) {
  static_assert(is_fp8<Narrow>);
  u32 spread0 = byte_permute(four, 0, 0x1404);  // each byte moves to the high half of 16 bits
  u32 spread1 = byte_permute(four, 0, 0x3424);
  if constexpr (is_same<Wide, Half> && is_same<Narrow, E5m2>) {
    pair0 = spread0;
    pair1 = spread1;
  } else if constexpr (is_same<Wide, Half>) {
#if __CUDA_ARCH__ >= 890
    // A mov divides the word: the conversion can read the upper half of a register, and a shift would be one more
    // instruction.
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, low;\ncvt.rn.f16x2.e4m3x2 %1, high;\n}"
        : "=r"(pair0), "=r"(pair1)
        : "r"(four));
#else
    constexpr u32 two_to_8 = 0x5c005c00;
    pair0 = mul_half2((spread0 & 0x80008000) | ((spread0 & 0x7f007f00) >> 1), two_to_8);
    pair1 = mul_half2((spread1 & 0x80008000) | ((spread1 & 0x7f007f00) >> 1), two_to_8);
#endif
  } else {
    constexpr int shift = is_same<Narrow, E4m3> ? 4 : 3;
    constexpr u32 bias = is_same<Narrow, E4m3> ? 0x7b807b80 : 0x77807780;  // 2^120, 2^112
    pair0 = mul_bf162((spread0 & 0x80008000) | ((spread0 & 0x7f007f00) >> shift), bias);
    pair1 = mul_bf162((spread1 & 0x80008000) | ((spread1 & 0x7f007f00) >> shift), bias);
  }
}

// Rounds to fp8, to nearest even; numbers that are too large become the largest one.
template <class Narrow>
FP_DEVICE Narrow narrow(float value) {
  static_assert(is_fp8<Narrow>);
#if __CUDA_ARCH__ >= 890
  u16 pair;
  if constexpr (is_same<Narrow, E4m3>) {
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.f), "f"(value));
  } else {
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.f), "f"(value));
  }
  return {static_cast<u8>(pair)};
#else
  constexpr int mantissa = is_same<Narrow, E4m3> ? 3 : 2, bias = is_same<Narrow, E4m3> ? 7 : 15;
  constexpr float largest = is_same<Narrow, E4m3> ? 448.f : 57344.f;
  constexpr float smallest = 1.f / (1 << (bias - 1)),
                  steps = smallest / (1 << mantissa);  // smallest normal number; distance of subnormal ones
  const u32 sign = __float_as_uint(value) >> 24 & 0x80;
  if (value != value) return {static_cast<u8>(sign | 0x7f)};
  const float magnitude = fminf(fabsf(value), largest);
  u32 bits;
  if (magnitude < smallest) {
    bits = __float2int_rn(magnitude / steps);
  } else {
    constexpr int dropped = 23 - mantissa;
    const u32 wide = __float_as_uint(magnitude);
    bits = ((wide + (1u << (dropped - 1)) - 1 + (wide >> dropped & 1)) >> dropped) - ((127 - bias) << mantissa);
  }
  return {static_cast<u8>(sign | bits)};
#endif
}

// As narrow, for two and four numbers; the first one comes to the lowest bits.
template <class Narrow>
FP_DEVICE u16 narrow2(float first, float second) {
  static_assert(is_same<Narrow, E4m3>);
#if __CUDA_ARCH__ >= 890
  u16 pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
  return pair;
#else
  return static_cast<u16>(narrow<Narrow>(first).bits | narrow<Narrow>(second).bits << 8);
#endif
}
template <class Narrow>
FP_DEVICE u32 narrow4(float first, float second, float third, float fourth) {
#if __CUDA_ARCH__ >= 890
  return pack4<Narrow>(first, second, third, fourth);
#else
  return narrow2<Narrow>(first, second) | static_cast<u32>(narrow2<Narrow>(third, fourth)) << 16;
#endif
}

}  // namespace flashpage::ptx
