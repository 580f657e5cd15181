// Conversions of bf16 on the host; others are declared alone.
#pragma once
#include "hopper.h"

namespace flashpage::ptx {

template <class T>
u32 pack2(float low, float high);
template <>
inline u32 pack2<Bf16>(float low, float high) {
  const auto bits = [](float number) {
    const u32 wide = std::bit_cast<u32>(number);
    return (wide + 0x7fff + (wide >> 16 & 1)) >> 16;
  };
  return bits(low) | bits(high) << 16;
}
inline float of_bits(u32 bf16) { return std::bit_cast<float>(bf16 << 16); }

u32 mul_half2(u32, u32);
u32 fma_half2(u32, u32, u32);
u32 negative_fma_half2(u32, u32, u32);
u32 byte_permute(u32, u32, u32);
template <class T>
T from_float(float value);
template <class T>
float to_float(T value);
template <class T>
float2 unpack2(u32 packed);
template <class Wide, class Narrow>
void widen4(u32 four, u32& pair0, u32& pair1);

}  // namespace flashpage::ptx
