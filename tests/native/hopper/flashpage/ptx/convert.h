// Conversions on the host: 16-bit numbers and their arithmetic, fp8 to 16 bits, and to and from e4m3.
#pragma once
#include "hopper.h"

namespace hopper {

inline float decode_half(u32 bits) {
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  const float normal = exponent == 31 ? (mantissa ? NAN : INFINITY) : std::ldexp(1024.f + mantissa, exponent - 25);
  const float magnitude = exponent > 0 ? normal : std::ldexp(float(mantissa), -24);
  return bits & 0x8000 ? -magnitude : magnitude;
}
inline float decode_e4m3(u32 bits) {
  const int exponent = bits >> 3 & 15, mantissa = bits & 7;
  const float normal = (bits & 0x7f) == 0x7f ? NAN : std::ldexp(8.f + mantissa, exponent - 10);
  const float magnitude = exponent > 0 ? normal : std::ldexp(float(mantissa), -9);
  return bits & 0x80 ? -magnitude : magnitude;
}
// Older compilers have no fp16, and products convert many numbers, so tables are used. They are filled by functions
// that are not constexpr: filled by the compiler they would take longer than to compile a whole kernel.
template <size_t count>
std::array<float, count> table(float (*decode)(u32 bits)) {
  std::array<float, count> numbers;
  for (u32 bits = 0; bits < count; ++bits) numbers[bits] = decode(bits);
  return numbers;
}
inline const std::array<float, 1 << 16> halves = table<1 << 16>(decode_half);
inline const std::array<float, 256> e4m3s = table<256>(decode_e4m3);
inline float of_half(u16 bits) { return halves[bits]; }
// Rounds to nearest even.
inline u32 to_half(float number) {
  const u32 sign = std::signbit(number) ? 0x8000 : 0;
  const float magnitude = std::fabs(number);
  if (std::isnan(number)) return 0x7fff;
  if (magnitude >= 65520.f) return sign | 0x7c00;
  const int exponent = magnitude < 0x1p-14f ? -14 : std::ilogb(magnitude);
  // In steps of this exponent: 1,024 steps are the first number of the next exponent, and below the lowest exponent
  // there are subnormal numbers.
  const int steps = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 10 - exponent)));
  return sign | (((exponent + 14) << 10) + steps);
}
inline float of_bf16(u32 bits) { return std::bit_cast<float>(bits << 16); }
inline u32 to_bf16(float number) {
  const u32 wide = std::bit_cast<u32>(number);
  return (wide + 0x7fff + (wide >> 16 & 1)) >> 16;
}
inline float of_e4m3(u8 bits) { return e4m3s[bits]; }
// Rounds to nearest even; numbers that are too large become the largest one.
inline u32 to_e4m3(float number) {
  const u32 sign = std::signbit(number) ? 0x80 : 0;
  const float magnitude = std::fabs(number);
  if (std::isnan(number)) return 0x7f;
  if (magnitude >= 448.f) return sign | 0x7e;
  const int exponent = magnitude < 0x1p-6f ? -6 : std::ilogb(magnitude);
  const int steps = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 3 - exponent)));
  return sign | (((exponent + 6) << 3) + steps);
}

}  // namespace hopper

namespace flashpage::ptx {

template <class T>
u32 pack2(float low, float high) {
  static_assert(is_same<T, Half> || is_same<T, Bf16>);
  return is_same<T, Half> ? hopper::to_half(low) | hopper::to_half(high) << 16
                          : hopper::to_bf16(low) | hopper::to_bf16(high) << 16;
}
template <class T>
u32 pack4(float first, float second, float third, float fourth) {
  static_assert(is_same<T, E4m3>);
  return hopper::to_e4m3(first) | hopper::to_e4m3(second) << 8 | hopper::to_e4m3(third) << 16 |
         hopper::to_e4m3(fourth) << 24;
}
template <class Wide, class Narrow>
void widen4(u32 four, u32& pair0, u32& pair1) {
  static_assert(is_fp8<Narrow>);
  u32 wide[4];
  for (int i = 0; i < 4; ++i) {
    const u8 bits = four >> 8 * i & 0xff;
    const float number = is_same<Narrow, E4m3> ? hopper::of_e4m3(bits) : hopper::of_half(bits << 8);
    wide[i] = !is_same<Wide, Half>    ? hopper::to_bf16(number)
              : is_same<Narrow, E4m3> ? hopper::to_half(number)
                                      : bits << 8;
  }
  pair0 = wide[0] | wide[1] << 16;
  pair1 = wide[2] | wide[3] << 16;
}

inline u32 min_half2(u32 a, u32 b) {
  const auto less = [&](int shift) {
    return hopper::of_half(a >> shift & 0xffff) < hopper::of_half(b >> shift & 0xffff);
  };
  return ((less(0) ? a : b) & 0xffff) | ((less(16) ? a : b) & 0xffff0000);
}
// of(low, low of b, low of c) and of(high, ...), rounded once: sums of these products are exact in double.
template <class Of, class To>
u32 pairwise(u32 a, u32 b, u32 c, double sign, Of of, To to) {
  const auto one = [&](int shift) {
    const double product = sign * of(a >> shift & 0xffff) * double{of(b >> shift & 0xffff)};
    return (to(static_cast<float>(product + of(c >> shift & 0xffff))) & 0xffff) << shift;
  };
  return one(0) | one(16);
}
inline u32 fma_half2(u32 a, u32 b, u32 c) { return pairwise(a, b, c, 1, hopper::of_half, hopper::to_half); }
inline u32 negative_fma_half2(u32 a, u32 b, u32 c) { return pairwise(a, b, c, -1, hopper::of_half, hopper::to_half); }
inline u32 mul_half2(u32 a, u32 b) { return fma_half2(a, b, 0x80008000); }
inline u32 fma_bf162(u32 a, u32 b, u32 c) { return pairwise(a, b, c, 1, hopper::of_bf16, hopper::to_bf16); }
inline u32 mul_bf162(u32 a, u32 b) { return fma_bf162(a, b, 0x80008000); }
inline u32 mul_half2_by(u32 a, u32 b, int second) {
  const u32 one = second ? b >> 16 : b & 0xffff;
  return mul_half2(a, one | one << 16);
}
inline u32 byte_permute(u32 low, u32 high, u32 selector) {
  const u64 bytes = static_cast<u64>(high) << 32 | low;
  u32 chosen = 0;
  for (int i = 0; i < 4; ++i) chosen |= static_cast<u32>(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return chosen;
}
template <class T>
T from_float(float value) {
  if constexpr (is_same<T, float>)
    return value;
  else
    return T{static_cast<u16>(pack2<T>(value, 0.f))};
}
template <class T>
float to_float(T value) {
  if constexpr (is_same<T, float>)
    return value;
  else if constexpr (is_same<T, Half>)
    return hopper::of_half(value.bits);
  else if constexpr (is_same<T, Bf16>)
    return hopper::of_bf16(value.bits);
  else
    return hopper::of_e4m3(value.bits);
}
template <class Narrow>
Narrow narrow(float value) {
  static_assert(is_same<Narrow, E4m3>);
  return Narrow{static_cast<u8>(hopper::to_e4m3(value))};
}
template <class Narrow>
u16 narrow2(float first, float second) {
  return narrow<Narrow>(first).bits | narrow<Narrow>(second).bits << 8;
}
template <class Narrow>
u32 narrow4(float first, float second, float third, float fourth) {
  return pack4<Narrow>(first, second, third, fourth);
}
template <class T>
float2 unpack2(u32 packed) {
  static_assert(is_same<T, Half> || is_same<T, Bf16>);
  if constexpr (is_same<T, Half>) {
    return {hopper::of_half(packed & 0xffff), hopper::of_half(packed >> 16)};
  } else {
    return {hopper::of_bf16(packed & 0xffff), hopper::of_bf16(packed >> 16)};
  }
}

}  // namespace flashpage::ptx
