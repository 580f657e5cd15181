// The variant's transform of a score: the scale turns it to natural units, then its logit function is applied.
#pragma once
#include "flashpage/params/variant.h"
#include "flashpage/ptx/math.h"
#include "flashpage/ptx/rcp.h"
#include "flashpage/tile/layout/shape.h"
#include "flashpage/tile/warp_rows.h"

namespace flashpage {

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

// The factor that softmax still applies.
template <class Traits>
FP_DEVICE float softmax_scale_of(float score_scale) {
  if constexpr (Traits::Variant::has_logit) return log2_e;
  return scales_first<Traits>(score_scale) ? 1.f : score_scale;
}

FP_DEVICE bool scales_heads(const AttentionParams& params) { return params.q_scale && params.q_scale_stride; }

// Whether transform_scores has anything to do for a unit. The vote changes nothing but what the compiler knows: the
// branch is the warp's, so nothing has to reconverge.
template <class Traits>
FP_DEVICE bool transforms_scores(const AttentionParams& params, float scale) {
  return Traits::Variant::has_logit || scales_heads(params) || __any_sync(0xffffffff, scales_first<Traits>(scale));
}

// cap * tanh(score / cap) is cap - 2 cap / (1 + 2^(exponent_scale * score)): five instructions. tanh is off by 2^-22 of
// its largest value, so that caps beyond `most` take the variant's own function.
struct SoftCap {
  static constexpr float most = 128.f;
  float cap, exponent_scale;

  FP_DEVICE explicit SoftCap(float cap) : cap(cap), exponent_scale(2.f * log2_e * ptx::reciprocal_approx(cap)) {}
  FP_DEVICE bool serves() const { return cap <= most && cap >= -most; }
  FP_DEVICE float of_exponent(float exponent) const {
    return vm::multiply_add(-2.f * cap, ptx::reciprocal_approx(1.f + ptx::exp2_approx(exponent)), cap);
  }
};

// The factor of scores in addition to their scale: that of the exponent, if a soft cap is the whole transform.
template <class Traits>
FP_DEVICE float first_factor(const VariantArgs& args) {
  if constexpr (Traits::Variant::only_soft_cap) {
    const SoftCap cap(Traits::Variant::soft_cap(args));
    if (cap.serves()) return cap.exponent_scale;
  }
  return 1.f;
}

// A row as transforms see it.
struct TransformedRow {
  float scale;
  i32 head, position;
};

// row_of(m, half) of a lane, as long as `rows` lives.
FP_DEVICE auto transformed_rows(float scale, const WarpRows& rows) {
  const AttentionParams& params = rows.params;
  const bool by_head = scales_heads(params);
  return [&params, &rows, scale, by_head](int m, int half) {
    const PackedRow row = rows.row(m, half);
    const float row_scale = by_head ? params.q_scale[row.head] * scale : scale;
    return TransformedRow{row_scale, row.head, query_position(rows.item, row.row)};
  };
}

// Whether a lane has registers to keep what it tells of rows from tile to tile. A soft cap, with its other function for
// large caps, takes them.
template <class Traits>
inline constexpr bool keeps_rows = Traits::Variant::has_logit && !Traits::Variant::ends_in_soft_cap;

// The rows of a lane's one m16 tile.
template <class Traits>
struct TransformedRows {
  TransformedRow row[2];

  FP_DEVICE TransformedRows(float scale, const WarpRows& rows) {
    const auto row_of = transformed_rows(scale, rows);
#pragma unroll
    for (int half = 0; half < 2; ++half) row[half] = row_of(0, half);
  }
};

struct NoRows {
  FP_DEVICE explicit NoRows(const auto&...) {}
};

// score = transform(score * scale, head, position, token) of each; row_of(m, half): its row.
template <class Traits, int token_tiles, class RowOf, class Transform>
FP_DEVICE void transform_each(float (&scores)[Shape<Traits>::row_tiles][token_tiles][4], i32 first_token, int lane,
                              RowOf&& row_of, Transform&& transform) {
#pragma unroll
  for (int m = 0; m < Shape<Traits>::row_tiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const TransformedRow row = row_of(m, half);
#pragma unroll
      for (int n = 0; n < token_tiles; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = scores[m][n][half * 2 + e];
          score = transform(score * row.scale, row, vm::Token{first_token + lane % 4 * 2, n * 8 + e});
        }
    }
}

// By the variant's logit function, of rows that row_of(m, half) tells.
template <class Traits, int token_tiles, class RowOf>
FP_DEVICE void transform_by_logit(float (&scores)[Shape<Traits>::row_tiles][token_tiles][4], const WarpRows& rows,
                                  const VariantArgs& args, i32 first_token, RowOf&& row_of) {
  using Variant = typename Traits::Variant;
  const WorkItem& item = rows.item;
  const int lane = rows.lane;
  // A token past the end is masked later; a variant may not load beyond the request.
  const auto known = [&](vm::Token token) {
    if constexpr (Variant::logit_loads_by_token) return min_of<i32>(token, item.kv_len - 1);
    if constexpr (!Variant::logit_loads_by_token) return token;
  };
  if constexpr (Variant::ends_in_soft_cap) {
    const SoftCap cap(Variant::soft_cap(args));
    if (cap.serves()) {
      if constexpr (Variant::only_soft_cap) {
        transform_each<Traits>(
            scores, first_token, lane, row_of,
            [&](float exponent, const TransformedRow&, vm::Token) { return cap.of_exponent(exponent); });
      } else {
        transform_each<Traits>(
            scores, first_token, lane, row_of, [&](float score, const TransformedRow& row, vm::Token token) {
              score = Variant::before_soft_cap(args, score, item.request, row.head, row.position, known(token));
              return cap.of_exponent(score * cap.exponent_scale);
            });
      }
      return;
    }
  }
  transform_each<Traits>(scores, first_token, lane, row_of,
                         [&](float score, const TransformedRow& row, vm::Token token) {
                           return Variant::logit(args, score, item.request, row.head, row.position, known(token));
                         });
}

template <class Traits, int token_tiles>
FP_DEVICE void transform_scores(float (&scores)[Shape<Traits>::row_tiles][token_tiles][4], float scale,
                                const WarpRows& rows, const VariantArgs& args, i32 first_token) {
  float first_scale = scales_first<Traits>(scale) ? scale : 1.f;
  if constexpr (Traits::Variant::has_logit) first_scale *= first_factor<Traits>(args);
  const auto row_of = transformed_rows(first_scale, rows);
  if constexpr (Traits::Variant::has_logit) {
    transform_by_logit<Traits>(scores, rows, args, first_token, row_of);
  } else {
    transform_each<Traits>(scores, first_token, rows.lane, row_of,
                           [](float score, const TransformedRow&, vm::Token) { return score; });
  }
}

}  // namespace flashpage
