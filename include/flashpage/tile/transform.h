// What the variant makes of a score: natural units after the scale, then its logit function.
#pragma once
#include "flashpage/ptx/math.h"
#include "flashpage/ptx/rcp.h"
#include "flashpage/tile/shape.h"
#include "flashpage/tile/unit.h"
#include "flashpage/variant.h"

namespace flashpage {

// A packed row of one lane, clamped to the unit's last row: m16 tile m, half 0 or 1, `first_row` the warp's first in
// the unit.
FP_DEVICE PackedRow lane_row(const AttentionParams& params, const Unit& unit, int first_row, int m, int half,
                             int lane) {
  i32 row = first_row + m * 16 + half * 8 + lane / 4;
  return unpack_row(params, unit.kv_head, unit.first_row + min_of(row, unit.num_rows - 1));
}

// Raw score to base 2; with a logit transform to natural units. A per-head q_scale is applied by transform_scores.
template <class Traits>
FP_DEVICE float score_scale_of(const AttentionParams& params, const Unit& unit) {
  float scale = params.score_scale;
  if (params.k_scale) scale *= params.k_scale[params.k_scale_stride * unit.kv_head];
  if (params.q_scale && params.q_scale_stride == 0) scale *= *params.q_scale;
  return Traits::Variant::has_logit ? scale : scale * log2_e;
}

// Softmax takes a row's maximum before it scales, which is right for positive scales alone: others, NaN included, and
// scales before a logit transform are transform_scores' to apply.
template <class Traits>
FP_DEVICE bool scales_first(float score_scale) {
  return Traits::Variant::has_logit || !(score_scale > 0.f);
}

// What softmax still multiplies.
template <class Traits>
FP_DEVICE float softmax_scale_of(float score_scale) {
  if constexpr (Traits::Variant::has_logit) return log2_e;
  return scales_first<Traits>(score_scale) ? 1.f : score_scale;
}

// Whether transform_scores has anything to do for a unit. The vote changes nothing but what the compiler knows: the
// branch is the warp's, so nothing has to reconverge.
template <class Traits>
FP_DEVICE bool transforms_scores(const AttentionParams& params, float scale) {
  bool per_head = params.q_scale && params.q_scale_stride;
  return Traits::Variant::has_logit || per_head || __any_sync(0xffffffff, scales_first<Traits>(scale));
}

// score = transform(score, head, position, token) of each, after `scale`.
template <class Traits, int token_tiles, class Transform>
FP_DEVICE void transform_each(float (&scores)[Shape<Traits>::row_tiles][token_tiles][4], float scale,
                              const AttentionParams& params, const WorkItem& item, const Unit& unit, int first_row,
                              i32 first_token, int lane, Transform&& transform) {
  const bool per_head = params.q_scale && params.q_scale_stride;
#pragma unroll
  for (int m = 0; m < Shape<Traits>::row_tiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      PackedRow row = lane_row(params, unit, first_row, m, half, lane);
      float row_scale = per_head ? params.q_scale[row.head] * scale : scale;
      i32 position = query_position(item, row.row);
#pragma unroll
      for (int n = 0; n < token_tiles; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = scores[m][n][half * 2 + e];
          const vm::Token token{first_token + lane % 4 * 2, n * 8 + e};
          score = transform(score * row_scale, row.head, position, token);
        }
    }
}

// cap * tanh(score / cap) is cap - 2 cap / (1 + 2^(exponent_scale * score)): five instructions. tanh is off by 2^-22 of
// its largest value, so that caps beyond `most` take the variant's own function.
struct SoftCap {
  static constexpr float most = 128.f;
  float cap, exponent_scale;

  FP_DEVICE explicit SoftCap(float cap) : cap(cap), exponent_scale(2.f * log2_e * ptx::reciprocal_approx(cap)) {}
  FP_DEVICE bool serves() const { return fabsf(cap) <= most; }
  FP_DEVICE float of_exponent(float exponent) const {
    return fmaf(-2.f * cap, ptx::reciprocal_approx(1.f + ptx::exp2_approx(exponent)), cap);
  }
};

template <class Traits, int token_tiles>
FP_DEVICE void transform_scores(float (&scores)[Shape<Traits>::row_tiles][token_tiles][4], float scale,
                                const AttentionParams& params, const VariantArgs& args, const WorkItem& item,
                                const Unit& unit, int first_row, i32 first_token, int lane) {
  using Variant = typename Traits::Variant;
  const auto each = [&](float scale, auto&& transform) {
    transform_each<Traits>(scores, scale, params, item, unit, first_row, first_token, lane, transform);
  };
  if constexpr (!Variant::has_logit) {
    each(scales_first<Traits>(scale) ? scale : 1.f, [](float score, i32, i32, vm::Token) { return score; });
  } else {
    // A token past the end is masked later; a variant may not load beyond the request.
    const auto known = [&](vm::Token token) {
      if constexpr (Variant::logit_loads_by_token) return min_of<i32>(token, item.kv_len - 1);
      if constexpr (!Variant::logit_loads_by_token) return token;
    };
    if constexpr (Variant::ends_in_soft_cap) {
      const SoftCap cap(Variant::soft_cap(args));
      if (cap.serves()) {
        if constexpr (Variant::only_soft_cap) {
          each(scale * cap.exponent_scale,
               [&](float exponent, i32, i32, vm::Token) { return cap.of_exponent(exponent); });
        } else {
          each(scale, [&](float score, i32 head, i32 position, vm::Token token) {
            score = Variant::before_soft_cap(args, score, item.request, head, position, known(token));
            return cap.of_exponent(score * cap.exponent_scale);
          });
        }
        return;
      }
    }
    each(scale, [&](float score, i32 head, i32 position, vm::Token token) {
      return Variant::logit(args, score, item.request, head, position, known(token));
    });
  }
}

}  // namespace flashpage
