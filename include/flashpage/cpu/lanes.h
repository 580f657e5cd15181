// Lanes: one vector register of floats or integers, and the operations of the kernels on it.
#pragma once
#include "flashpage/common/math.h"
#include "flashpage/cpu/mask_lanes.h"

namespace flashpage::cpu {

inline constexpr float infinity = __builtin_inff();

// Lanes in memory: unaligned, and may alias any type.
template <class Vector>
struct __attribute__((packed, may_alias)) Stored {
  Vector value;
};
inline FloatLanes load_bits(const void* source) { return static_cast<const Stored<FloatLanes>*>(source)->value; }
inline void store_bits(void* destination, FloatLanes x) { static_cast<Stored<FloatLanes>*>(destination)->value = x; }
inline ShortLanes load_shorts(const void* source) { return static_cast<const Stored<ShortLanes>*>(source)->value; }
inline void store_shorts(void* destination, ShortLanes x) { static_cast<Stored<ShortLanes>*>(destination)->value = x; }

inline FloatLanes splat(float x) { return FloatLanes{} + x; }
inline FloatLanes splat_bits(u32 x) { return (FloatLanes)(IntLanes{} + static_cast<i32>(x)); }

// first, first + 1, ...
inline IntLanes count_from(i32 first) {
  IntLanes lanes;
  for (int i = 0; i < num_lanes; ++i) lanes[i] = i;
  return lanes + first;
}
inline MaskLanes between(IntLanes x, i32 begin, i32 end) {
  return less_equal(IntLanes{} + begin, x) & less(x, IntLanes{} + end);
}

inline float horizontal_max(FloatLanes x) {
  float result = x[0];
  for (int i = 1; i < num_lanes; ++i) result = x[i] > result ? x[i] : result;
  return result;
}
inline float horizontal_sum(FloatLanes x) {
  float parts[num_lanes];
  store_bits(parts, x);
  for (int width = num_lanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) parts[i] += parts[i + width];
  return parts[0];
}

// A polynomial, lowest power first. Coefficients below are minimax fits of the relative error on the stated range.
template <int terms>
inline FloatLanes polynomial(FloatLanes x, const float (&coefficients)[terms]) {
  FloatLanes sum = splat(coefficients[terms - 1]);
#pragma GCC unroll 8
  for (int i = terms - 2; i >= 0; --i) sum = sum * x + coefficients[i];
  return sum;
}

inline FloatLanes round_to_integer(FloatLanes x) {
  constexpr float magic = 12582912.0f;  // 1.5 * 2^23 leaves no fraction bits; valid for |x| < 2^22
  return (x + magic) - magic;
}

// 2^x for |x| <= 0.5; error 2e-9 before rounding.
inline FloatLanes exp2_of_fraction(FloatLanes x) {
  constexpr float coefficients[] = {1.0f,           0.69314718246f, 0.24022646248f, 0.05550328642f,
                                    0.00961848907f, 0.00133999309f, 0.00015345812f};
  return polynomial(x, coefficients);
}

// Clamps to [low, high]; a NaN stays a NaN.
inline FloatLanes clamp_number(FloatLanes x, float low, float high) {
  x = x < low ? splat(low) : x;
  return x > high ? splat(high) : x;
}

// Beyond these powers a float has over- or underflown; scale_by_power reaches this far.
inline constexpr float lowest_power = -250.0f, highest_power = 250.0f;

// 2^x for x <= 0: exactly 0 for -inf and anything far below; a NaN stays a NaN.
inline FloatLanes exp2_of_negative(FloatLanes x) {
  x = x < lowest_power ? splat(lowest_power) : x;
  const FloatLanes whole = round_to_integer(x);
  return scale_by_power(exp2_of_fraction(x - whole), whole);
}

}  // namespace flashpage::cpu
