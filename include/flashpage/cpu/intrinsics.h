// Instructions that vector extensions cannot express, named after what they do; mask_lanes.h has those on masks.
#pragma once
#if defined(__AVX512F__) || defined(__clang__) && defined(__AVX2__)  // its builtins differ between compilers' releases
#include <immintrin.h>
#endif

#include "flashpage/common/types.h"

#if !(defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)) && !defined(__ARM_NEON)
#error "flashpage's CPU kernels need AVX2, FMA and F16C, or NEON"
#endif

namespace flashpage::cpu {

#if defined(__AVX512F__)
inline constexpr int num_lanes = 16;
#else
inline constexpr int num_lanes = 8;
#endif

// One vector register of 32-bit lanes, or two of NEON's 32: enough for what AVX2 does with its 16.
using FloatLanes = float __attribute__((vector_size(num_lanes * 4)));
using IntLanes = i32 __attribute__((vector_size(num_lanes * 4)));
using ShortLanes = u16 __attribute__((vector_size(num_lanes * 2)));

#if defined(__AVX512F__)

inline FloatLanes half_to_float(ShortLanes bits) { return (FloatLanes)_mm512_cvtph_ps((__m256i)bits); }
inline ShortLanes float_to_half(FloatLanes x) {
  return (ShortLanes)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// x * 2^n for integral n; underflows gradually, then to 0.
inline FloatLanes scale_by_power(FloatLanes x, FloatLanes n) {
  return (FloatLanes)_mm512_scalef_ps((__m512)x, (__m512)n);
}
inline FloatLanes square_root(FloatLanes x) { return (FloatLanes)_mm512_sqrt_ps((__m512)x); }
inline FloatLanes round_down(FloatLanes x) {
  return (FloatLanes)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
}

#else

#if defined(__ARM_NEON)

using HalfLanes = __fp16 __attribute__((vector_size(num_lanes * 2)));
inline FloatLanes half_to_float(ShortLanes bits) { return __builtin_convertvector((HalfLanes)bits, FloatLanes); }
inline ShortLanes float_to_half(FloatLanes x) { return (ShortLanes) __builtin_convertvector(x, HalfLanes); }
inline FloatLanes square_root(FloatLanes x) {
  for (int i = 0; i < num_lanes; ++i) x[i] = __builtin_sqrtf(x[i]);
  return x;
}
inline FloatLanes round_down(FloatLanes x) {
  for (int i = 0; i < num_lanes; ++i) x[i] = __builtin_floorf(x[i]);
  return x;
}

#elif defined(__clang__)

inline FloatLanes half_to_float(ShortLanes bits) { return (FloatLanes)_mm256_cvtph_ps((__m128i)bits); }
inline ShortLanes float_to_half(FloatLanes x) {
  return (ShortLanes)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline FloatLanes square_root(FloatLanes x) { return (FloatLanes)_mm256_sqrt_ps((__m256)x); }
inline FloatLanes round_down(FloatLanes x) {
  return (FloatLanes)_mm256_round_ps((__m256)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
}

#else

// GCC's own builtins: with <immintrin.h> a compile would take half as long again.
using SignedShortLanes = short __attribute__((vector_size(num_lanes * 2)));
inline constexpr int to_nearest = 8, to_negative_infinity = 9;  // without exceptions

inline FloatLanes half_to_float(ShortLanes bits) { return __builtin_ia32_vcvtph2ps256((SignedShortLanes)bits); }
inline ShortLanes float_to_half(FloatLanes x) { return (ShortLanes)__builtin_ia32_vcvtps2ph256(x, to_nearest); }
inline FloatLanes square_root(FloatLanes x) { return __builtin_ia32_sqrtps256(x); }
inline FloatLanes round_down(FloatLanes x) { return __builtin_ia32_roundps256(x, to_negative_infinity); }

#endif

// Multiplies by two factors, because 2^n alone can leave the exponent's range while the product does not.
inline FloatLanes scale_by_power(FloatLanes x, FloatLanes n) {
  const IntLanes power = __builtin_convertvector(n, IntLanes), half = power >> 1, rest = power - half;
  return x * (FloatLanes)((half + 127) << 23) * (FloatLanes)((rest + 127) << 23);
}

#endif

// sum + a * b over 32-bit words: each holds a float, or a pair of Bf16 that are neighbours along the contraction.
template <class Operand>
inline FloatLanes multiply_add(FloatLanes sum, FloatLanes a, FloatLanes b) {
  static_assert(is_same<Operand, float>);
  return sum + a * b;
}

#if defined(__AVX512BF16__)

inline ShortLanes float_to_bf16(FloatLanes x) { return (ShortLanes)_mm512_cvtneps_pbh((__m512)x); }
// sum + a.low * b.low + a.high * b.high in every lane, fp32 accumulation.
template <>
inline FloatLanes multiply_add<Bf16>(FloatLanes sum, FloatLanes a, FloatLanes b) {
  return (FloatLanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(__m512i)a, (__m512bh)(__m512i)b);
}

#else

// Rounds to nearest even; a NaN stays a NaN.
inline ShortLanes float_to_bf16(FloatLanes x) {
  const IntLanes bits = (IntLanes)x;
  const IntLanes rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16, quiet = (bits >> 16) | 0x40;
  return __builtin_convertvector(x == x ? rounded : quiet, ShortLanes);
}

#endif

// Prefetches into the second cache level, so that the next tile's rows arrive while this tile is computed.
inline void prefetch(const void* address) { __builtin_prefetch(address, 0, 2); }

}  // namespace flashpage::cpu
