// Stored numbers of latent rows in fp8, converted to the type of the products.
#pragma once
#include "flashpage/params/latent_format.h"
#include "flashpage/ptx/convert.h"
#include "flashpage/tile/merge/epilogue.h"
#include "flashpage/tile/softmax/transform.h"

namespace flashpage {

// The factors of scores and of values, as score_scale_of and value_scale_of. Rows in fp8: tensors of scales are applied
// to elements; a number for the shared columns is already in params.score_scale and value_scale, and tail_scale is
// relative to it.
template <class Traits>
FP_DEVICE float latent_score_scale(const AttentionParams& params, const WorkItem& item, const Unit& unit) {
  if constexpr (!converts_latents<Traits>) return score_scale_of<Traits>(params, item, unit);
  return params.score_scale * log2_e;
}
template <class Traits>
FP_DEVICE float latent_value_scale(const AttentionParams& params, const WorkItem& item, const Unit& unit) {
  return converts_latents<Traits> ? params.value_scale : value_scale_of(params, item, unit.kv_head);
}

// Maxima move if a score exceeds them by 2^1. A probability above 1 costs fp32 sums no precision, but its 16-bit factor
// is off by up to 2^-8 of itself, where that of a maximum is exact, which shows where few tokens have most of the sum.
constexpr float latent_headroom = 1.f;

FP_DEVICE float latent_scale(float scale) { return scale; }
FP_DEVICE float latent_scale(PowerOfTwo scale) { return __uint_as_float(static_cast<u32>(scale.exponent) << 23); }

// Four e4m3 as two pairs of bf16, times 2^(exponent - 127). A byte's exponent and mantissa become those of a bf16 2^120
// times too small, so the factor has 2^120 more; it holds scales of up to 2^7, and larger ones take a second factor. A
// NaN becomes 480.
FP_DEVICE void widen4_by(u32 four, u32 exponent, u32& pair0, u32& pair1) {
  constexpr u32 most = 127 + 7, twice = 0x00010001, magnitude = 0x7f007f00, sign = 0x80008000;
  const u32 factor = (min_of(exponent, most) + 120) << 7;
  const u32 spread0 = ptx::byte_permute(four, 0, 0x1404), spread1 = ptx::byte_permute(four, 0, 0x3424);
  pair0 = ptx::mul_bf162((spread0 & sign) | ((spread0 & magnitude) >> 4), factor * twice);
  pair1 = ptx::mul_bf162((spread1 & sign) | ((spread1 & magnitude) >> 4), factor * twice);
  if (exponent > most) {
    const u32 rest = (exponent - most + 127) << 7;
    pair0 = ptx::mul_bf162(pair0, rest * twice), pair1 = ptx::mul_bf162(pair1, rest * twice);
  }
}

// Pairs of From as pairs of To, times a scale.
template <class To, class From>
FP_DEVICE void scale_pairs(u32 (&pairs)[4], float scale) {
#pragma unroll
  for (u32& pair : pairs) {
    const float2 two = ptx::unpack2<From>(pair);
    pair = ptx::pack2<To>(two.x * scale, two.y * scale);
  }
}

// Eight e4m3, in two words, as pairs of To, times a scale.
template <class To>
FP_DEVICE void widen_eight(u32 (&pairs)[4], u32 first, u32 second, float scale) {
  ptx::widen4<Half, E4m3>(first, pairs[0], pairs[1]);
  ptx::widen4<Half, E4m3>(second, pairs[2], pairs[3]);
  scale_pairs<To, Half>(pairs, scale);
}

// Stores sixteen e4m3 as two chunks of eight To, times a scale: the first two words' chunk or, `turned`, the other one
// comes first. store(place, pairs): place 0 is that of the chunk that comes first.
template <class To>
FP_DEVICE void store_widened(const u32 (&words)[4], bool turned, float scale, auto&& store) {
  u32 pairs[4];
  widen_eight<To>(pairs, turned ? words[2] : words[0], turned ? words[3] : words[1], scale);
  store(0, pairs);
  widen_eight<To>(pairs, turned ? words[0] : words[2], turned ? words[1] : words[3], scale);
  store(1, pairs);
}

// Eight stored elements as pairs of To, times a scale; 16-bit elements of the same type have no scale.
template <class To, class Stored>
FP_DEVICE void widen_eight(u32 (&pairs)[4], const u8* from, float scale) {
  if constexpr (is_fp8<Stored>) {
    const uint2 bytes = *reinterpret_cast<const uint2*>(from);
    widen_eight<To>(pairs, bytes.x, bytes.y, scale);
  } else {
    const uint4 words = *reinterpret_cast<const uint4*>(from);
    pairs[0] = words.x, pairs[1] = words.y, pairs[2] = words.z, pairs[3] = words.w;
    if constexpr (!is_same<Stored, To>) scale_pairs<To, Stored>(pairs, scale);
  }
}

}  // namespace flashpage
