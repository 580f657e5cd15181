// Conversions of single fp32, fp16, bf16 and e4m3 values without branches, so that plain loops over them vectorise on
// any processor. (The attention kernels' own conversions, of whole vectors, are in include/flashpage/cpu/.)
#pragma once
#include <bit>

#include "flashpage/common/types.h"

namespace flashpage::host {

[[gnu::always_inline]] inline float to_float(float x) { return x; }
[[gnu::always_inline]] inline float to_float(Bf16 x) { return std::bit_cast<float>(static_cast<u32>(x.bits) << 16); }
[[gnu::always_inline]] inline float to_float(Half x) {
  const u32 sign = static_cast<u32>(x.bits & 0x8000) << 16;
  const u32 magnitude = static_cast<u32>(x.bits & 0x7fff) << 13;
  const u32 normal = magnitude + (112u << 23);                                  // bias 15 -> 127
  const u32 special = magnitude + (224u << 23);                                 // infinity and NaN
  const float denormal = std::bit_cast<float>(normal + (1u << 23)) - 0x1p-14f;  // exact
  const u32 bits = magnitude < (1u << 23) ? std::bit_cast<u32>(denormal) : magnitude < (31u << 23) ? normal : special;
  return std::bit_cast<float>(bits | sign);
}

[[gnu::always_inline]] inline float to_float(E4m3 x) {
  const u32 magnitude = x.bits & 0x7f, sign = static_cast<u32>(x.bits & 0x80) << 24;
  const float denormal = static_cast<float>(magnitude) * 0x1p-9f;
  const u32 normal = magnitude == 0x7f ? 0x7fc00000 : (magnitude << 20) + (120u << 23);
  return std::bit_cast<float>((magnitude < 8 ? std::bit_cast<u32>(denormal) : normal) | sign);
}

// Rounds to nearest even; NaN stays NaN. In e4m3 numbers that are too large become the largest one.
template <class T>
T from_float(float x);

template <>
[[gnu::always_inline]] inline float from_float<float>(float x) {
  return x;
}
template <>
[[gnu::always_inline]] inline Bf16 from_float<Bf16>(float x) {
  const u32 bits = std::bit_cast<u32>(x);
  const u32 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const u32 nan = (bits >> 16) | 0x40;
  return {static_cast<u16>((bits & 0x7fffffff) > 0x7f800000 ? nan : rounded)};
}
template <>
[[gnu::always_inline]] inline Half from_float<Half>(float x) {
  const u32 bits = std::bit_cast<u32>(x);
  const u32 magnitude = bits & 0x7fffffff;
  const u32 normal = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  const u32 denormal = std::bit_cast<u32>(std::bit_cast<float>(magnitude) + 0.5f) - std::bit_cast<u32>(0.5f);
  const u32 special = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
  const u32 rounded = magnitude >= (143u << 23) ? special : magnitude < (113u << 23) ? denormal : normal;
  return {static_cast<u16>(rounded | ((bits >> 16) & 0x8000))};
}
template <>
[[gnu::always_inline]] inline E4m3 from_float<E4m3>(float x) {
  const u32 bits = std::bit_cast<u32>(x);
  const u32 magnitude = bits & 0x7fffffff, largest = std::bit_cast<u32>(448.0f);
  const u32 clamped = magnitude < largest ? magnitude : largest;
  const u32 normal = (clamped - (120u << 23) + 0x7ffff + ((clamped >> 20) & 1)) >> 20;
  const u32 denormal = std::bit_cast<u32>(std::bit_cast<float>(clamped) + 16384.0f) - std::bit_cast<u32>(16384.0f);
  const u32 number = clamped < (121u << 23) ? denormal : normal;
  return {static_cast<u8>((magnitude > 0x7f800000 ? 0x7f : number) | ((bits >> 24) & 0x80))};
}

}  // namespace flashpage::host
