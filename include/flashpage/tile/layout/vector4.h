// Four consecutive elements of a row, converted to and from fp32; rows start on multiples of four elements.
#pragma once
#include "flashpage/ptx/convert.h"

namespace flashpage {

template <class T>
FP_DEVICE float4 load4(const T* from) {
  if constexpr (is_same<T, float>) {
    return *reinterpret_cast<const float4*>(from);
  } else {
    uint2 packed = *reinterpret_cast<const uint2*>(from);
    auto element = [](u32 pair, int i) { return ptx::to_float(T{static_cast<u16>(pair >> 16 * i)}); };
    return make_float4(element(packed.x, 0), element(packed.x, 1), element(packed.y, 0), element(packed.y, 1));
  }
}

template <class T>
FP_DEVICE void store4(T* to, float4 v) {
  if constexpr (is_same<T, float>) {
    *reinterpret_cast<float4*>(to) = v;
  } else if constexpr (is_same<T, E4m3>) {
    *reinterpret_cast<u32*>(to) = ptx::narrow4<T>(v.x, v.y, v.z, v.w);
  } else {
    *reinterpret_cast<uint2*>(to) = make_uint2(ptx::pack2<T>(v.x, v.y), ptx::pack2<T>(v.z, v.w));
  }
}

FP_DEVICE float4 add_scaled(float4 sum, float4 v, float weight) {
  return make_float4(fmaf(v.x, weight, sum.x), fmaf(v.y, weight, sum.y), fmaf(v.z, weight, sum.z),
                     fmaf(v.w, weight, sum.w));
}

FP_DEVICE float4 scaled(float4 v, float factor) {
  return make_float4(v.x * factor, v.y * factor, v.z * factor, v.w * factor);
}

}  // namespace flashpage
