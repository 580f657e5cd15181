// Small integer and constant helpers shared by host and device.
#pragma once
#include "flashpage/common/types.h"

namespace flashpage {

inline constexpr float log2_e = 1.4426950408889634f;
inline constexpr float ln_2 = 0.6931471805599453f;

template <class T>
FP_HOST_DEVICE constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}
template <class T>
FP_HOST_DEVICE constexpr T round_up(T a, T b) {
  return ceil_div(a, b) * b;
}
template <class T>
FP_HOST_DEVICE constexpr T min_of(T a, T b) {
  return a < b ? a : b;
}
template <class T>
FP_HOST_DEVICE constexpr T max_of(T a, T b) {
  return a > b ? a : b;
}

// The smallest power of two that is not below n.
FP_HOST_DEVICE constexpr i32 power_of_two_from(i32 n) {
  i32 power = 1;
  while (power < n) power *= 2;
  return power;
}

FP_HOST_DEVICE constexpr i32 greatest_common_divisor(i32 a, i32 b) {
  while (b != 0) {
    const i32 rest = a % b;
    a = b;
    b = rest;
  }
  return a;
}

// The rounded product of a and b. Written so that device compilers cannot contract it with a later addition into one
// fma: the host and a card compute the same bits.
FP_HOST_DEVICE double product(double a, double b) {
#if defined(__CUDA_ARCH__)
  return __dmul_rn(a, b);
#else
  return a * b;
#endif
}
FP_HOST_DEVICE double square_root(double x) {
#if defined(__CUDA_ARCH__)
  return __dsqrt_rn(x);
#else
  return __builtin_sqrt(x);
#endif
}

FP_HOST_DEVICE constexpr i32 count_ones(u32 bits) {
  bits -= bits >> 1 & 0x55555555;
  bits = (bits & 0x33333333) + (bits >> 2 & 0x33333333);
  return static_cast<i32>(((bits + (bits >> 4)) & 0x0f0f0f0f) * 0x01010101 >> 24);
}

// Division of 0 <= n < 2^31 by a divisor that is fixed for a launch: one wide multiply instead of a division sequence.
struct FastDiv {
  u32 divisor;
  u32 multiplier;
  u32 shift;  // the quotient is (n * multiplier) >> (32 + shift); for a power of two, multiplier is 0 and it is n >>
              // shift

  FP_HOST_DEVICE u32 div(u32 n) const {
    if (multiplier == 0) return n >> shift;
    return static_cast<u32>((static_cast<u64>(n) * multiplier) >> 32) >> shift;
  }
  // The largest multiple of the divisor up to n.
  FP_HOST_DEVICE u32 down(u32 n) const { return multiplier == 0 ? n & (0u - divisor) : div(n) * divisor; }
  FP_HOST_DEVICE void divmod(u32 n, u32& quotient, u32& remainder) const {
    quotient = div(n);
    remainder = n - quotient * divisor;
  }
};

FP_HOST_DEVICE constexpr FastDiv make_fast_div(u32 divisor) {
  u32 log = 0;
  while ((1ull << log) < divisor) ++log;
  if ((1u << log) == divisor) return {divisor, 0, log};
  // Round-up method: m = ceil(2^(32 + s) / d) with s = floor(log2 d) is exact for every n < 2^31.
  u32 shift = log - 1;
  u64 multiplier = ((1ull << (32 + shift)) + divisor - 1) / divisor;
  return {divisor, static_cast<u32>(multiplier), shift};
}

}  // namespace flashpage
