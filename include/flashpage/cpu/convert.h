// Conversions between the element types of tensors and the two types that kernels compute with: float, and pairs of
// Bf16 where the CPU multiplies them.
#pragma once
#include "flashpage/cpu/lanes.h"

namespace flashpage::cpu {

// Converts through half, which has the same fields but bias 15 instead of 7: subnormal numbers need no special case.
inline FloatLanes e4m3_to_float(ShortLanes bits) {
  const ShortLanes magnitude = bits & 0x7f;
  const ShortLanes half = ((bits & 0x80) << 8) | (magnitude << 7);
  return half_to_float(magnitude == 0x7f ? ShortLanes{} + 0x7e00 : half) * 256.0f;
}

inline ShortLanes load_bytes(const void* source) {
  u8 __attribute__((vector_size(num_lanes))) bytes;
  __builtin_memcpy(&bytes, source, num_lanes);
  return __builtin_convertvector(bytes, ShortLanes);
}

inline FloatLanes bf16_to_float(ShortLanes bits) { return (FloatLanes)(__builtin_convertvector(bits, IntLanes) << 16); }

inline void store_bytes(void* destination, IntLanes x) {
  const auto bytes = __builtin_convertvector(x, u8 __attribute__((vector_size(num_lanes))));
  __builtin_memcpy(destination, &bytes, num_lanes);
}

// Rounds to nearest even; numbers that are too large become the largest one, and a NaN stays a NaN.
inline IntLanes float_to_e4m3(FloatLanes x) {
  const IntLanes sign = (IntLanes)x >> 24 & 0x80;
  FloatLanes magnitude = (FloatLanes)((IntLanes)x & 0x7fffffff);
  magnitude = magnitude > 448.0f ? splat(448.0f) : magnitude;
  const IntLanes wide = (IntLanes)magnitude;
  const IntLanes normal = ((wide + 0x7ffff + (wide >> 20 & 1)) >> 20) - (120 << 3);
  const IntLanes subnormal = __builtin_convertvector(round_to_integer(magnitude * 512.0f), IntLanes);
  const IntLanes rounded = wide < 121 << 23 ? subnormal : normal;
  return sign | (x == x ? rounded : IntLanes{} + 0x7f);
}

// Loads num_lanes elements as floats.
template <class T>
inline FloatLanes load(const T* source) {
  if constexpr (is_same<T, float>) return load_bits(source);
  if constexpr (is_same<T, Half>) return half_to_float(load_shorts(source));
  if constexpr (is_same<T, Bf16>) return bf16_to_float(load_shorts(source));
  if constexpr (is_same<T, E4m3>) return e4m3_to_float(load_bytes(source));
  if constexpr (is_same<T, E5m2>) return half_to_float(load_bytes(source) << 8);
}

template <class T>
inline void store(T* destination, FloatLanes x) {
  if constexpr (is_same<T, float>) store_bits(destination, x);
  if constexpr (is_same<T, Half>) store_shorts(destination, float_to_half(x));
  if constexpr (is_same<T, Bf16>) store_shorts(destination, float_to_bf16(x));
  if constexpr (is_same<T, E4m3>) store_bytes(destination, float_to_e4m3(x));
}

// Loads the first `count` lanes and sets the others to 0; later memory is not read. `count` is constant after
// inlining.
template <class T>
inline FloatLanes load_first(const T* source, int count) {
  if (count >= num_lanes) return load(source);
  T part[num_lanes] = {};
  __builtin_memcpy(part, source, count * sizeof(T));
  return load(part);
}
template <class T>
inline void store_first(T* destination, FloatLanes x, int count) {
  if (count >= num_lanes) return store(destination, x);
  T part[num_lanes];
  store(part, x);
  __builtin_memcpy(destination, part, count * sizeof(T));
}

// The type in which products are computed: bf16 for bf16 queries over bf16 or fp8 keys (bf16 holds fp8 exactly), float
// for everything else, formats with scales (rows of u8) included.
template <class Query, class Kv>
struct ChooseOperand {
  using type = float;
};
#if defined(__AVX512BF16__)
template <class Kv>
struct ChooseOperand<Bf16, Kv> {
  using type = Bf16;
};
template <>
struct ChooseOperand<Bf16, u8> {
  using type = float;
};
#endif
template <class Query, class Kv>
using Operand = typename ChooseOperand<Query, Kv>::type;

// Elements of a 32-bit word (multiply_add in intrinsics.h).
template <class Operand>
inline constexpr int word_elements = 4 / sizeof(Operand);

// Loads the first `count` words of a row as operands and sets the others to 0.
template <class Operand, class T>
inline FloatLanes load_words(const T* source, int count) {
  if constexpr (is_same<Operand, float>) {
    return load_first(source, count);
  } else if constexpr (is_same<T, Operand>) {
    if (count >= num_lanes) return load_bits(source);
    u32 part[num_lanes] = {};
    __builtin_memcpy(part, source, count * 4);
    return load_bits(part);
  } else {
    Operand part[2 * num_lanes];
    const int elements = 2 * count;
    store(part, load_first(source, min_of(elements, num_lanes)));
    store(part + num_lanes, elements > num_lanes ? load_first(source + num_lanes, elements - num_lanes) : FloatLanes{});
    return load_bits(part);
  }
}

}  // namespace flashpage::cpu
