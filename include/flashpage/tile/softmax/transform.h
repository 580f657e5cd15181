// The variant's transform of a score: the scale converts it to natural-log units, then the logit function is applied.
#pragma once
#include "flashpage/params/variant.h"
#include "flashpage/ptx/math.h"
#include "flashpage/tile/layout/shape.h"
#include "flashpage/tile/softmax/half_scales.h"
#include "flashpage/tile/softmax/soft_cap.h"
#include "flashpage/tile/warp_rows.h"

namespace flashpage {

// Whether the tanh of a soft cap may be off by 2^-11 of a score. A kernel that is limited by arithmetic says so in its
// Traits.
template <class Traits>
inline constexpr bool approximates_tanh = [] {
  if constexpr (requires { Traits::approximates_tanh; }) {
    constexpr bool has_half_weights = is_same<typename Shape<Traits>::Probability, Half>;
    static_assert(!Traits::approximates_tanh || !has_half_weights, "fp16 weights keep more bits than such a tanh has");
    return Traits::approximates_tanh;
  }
  return false;
}();
template <class Traits>
using SoftCapOf = SoftCap<approximates_tanh<Traits>>;

// The factor from a raw score to base 2, or to natural-log units if there is a logit transform, without a per-head
// q_scale.
template <class Traits>
FP_DEVICE float score_scale_of(const AttentionParams& params, const WorkItem& item, const Unit& unit) {
  float scale = params.score_scale;
  if (params.k_scale)
    scale *= params.k_scale[params.k_scale_stride * unit.kv_head + params.k_scale_request_stride * item.request];
  if (params.q_scale && params.q_scale_stride == 0)
    scale *= params.q_scale[params.q_scale_request_stride * item.request];
  return Traits::Variant::has_logit ? scale : scale * log2_e;
}

// Softmax takes a row's maximum before it scales, which is only right for positive scales. transform_scores applies all
// others, NaN included, and the scale before a logit transform.
template <class Traits>
FP_DEVICE bool scales_first(float score_scale) {
  return Traits::Variant::has_logit || !(score_scale > 0.f);
}

// The factor that softmax applies after transform_scores.
template <class Traits>
FP_DEVICE float softmax_scale_of(float score_scale, [[maybe_unused]] const VariantArgs& args) {
  if constexpr (Traits::Variant::ends_in_soft_cap)
    return SoftCapOf<Traits>(Traits::Variant::soft_cap(args)).softmax_scale();
  if constexpr (Traits::Variant::has_logit) return log2_e;
  return scales_first<Traits>(score_scale) ? 1.f : score_scale;
}

FP_DEVICE bool scales_heads(const AttentionParams& params) { return params.q_scale && params.q_scale_stride; }

// The scale of a query head, if scales_heads.
FP_DEVICE float head_scale_of(const AttentionParams& params, const WorkItem& item, i32 head) {
  return params.q_scale[params.q_scale_request_stride * item.request + head];
}

// Whether transform_scores has anything to do for a unit. The vote does not change the result, but tells the compiler
// that the whole warp branches, so that nothing has to reconverge.
template <class Traits>
FP_DEVICE bool transforms_scores(HalfScales scale) {
  return Traits::Variant::has_logit ||
         __any_sync(0xffffffff, scales_first<Traits>(scale.of_half[0]) || scales_first<Traits>(scale.of_half[1]));
}
// `scale`: without the scales of query heads.
template <class Traits>
FP_DEVICE bool transforms_scores(const AttentionParams& params, float scale) {
  const bool by_head = scales_heads(params);
  return Traits::Variant::has_logit || by_head || __any_sync(0xffffffff, scales_first<Traits>(scale));
}

// A factor of scores in addition to their scale: argument_scale, if a soft cap is the whole transform.
template <class Traits>
FP_DEVICE float first_factor(const VariantArgs& args) {
  if constexpr (Traits::Variant::only_soft_cap)
    return SoftCapOf<Traits>(Traits::Variant::soft_cap(args)).argument_scale;
  return 1.f;
}
// The factor that transform_scores applies, before the transform if there is one.
template <class Traits>
FP_DEVICE float first_scale_of(float score_scale, [[maybe_unused]] const VariantArgs& args) {
  if constexpr (Traits::Variant::has_logit) return score_scale * first_factor<Traits>(args);
  return scales_first<Traits>(score_scale) ? score_scale : 1.f;
}

// The properties of a row on which a transform depends.
struct TransformedRow {
  float scale;
  i32 head, position;
};

// A function row_of(m, half) of the lane's rows, with the scales that transform_scores applies; it is valid as long as
// its arguments are. `scale` is a number without the scales of query heads, or HalfScales of one m16 tile with them.
template <class Traits>
FP_DEVICE auto transformed_rows(float scale, const WarpRows& rows, const VariantArgs& args) {
  const AttentionParams& params = rows.params;
  const bool by_head = scales_heads(params);
  scale = first_scale_of<Traits>(scale, args);
  return [&params, &rows, scale, by_head](int m, int half) {
    const PackedRow row = rows.row(m, half);
    const float row_scale = by_head ? head_scale_of(params, rows.item, row.head) * scale : scale;
    return TransformedRow{row_scale, row.head, query_position(rows.item, row.row)};
  };
}
template <class Traits>
FP_DEVICE auto transformed_rows(const HalfScales& scale, const WarpRows& rows, const VariantArgs& args) {
  return [&rows, &args, &scale](int m, int half) {
    const PackedRow row = rows.row(m, half);
    const float row_scale = first_scale_of<Traits>(scale.of_half[half], args);
    return TransformedRow{row_scale, row.head, query_position(rows.item, row.row)};
  };
}

// Whether a lane has registers to keep its TransformedRows from tile to tile. A soft cap takes them, because it keeps
// all of a tile's arguments until it knows that they are small.
template <class Traits>
inline constexpr bool keeps_rows = Traits::Variant::has_logit && !Traits::Variant::ends_in_soft_cap;

// The rows of a lane's one m16 tile.
template <class Traits>
struct TransformedRows {
  TransformedRow row[2];

  FP_DEVICE TransformedRows(const HalfScales& scale, const WarpRows& rows, const VariantArgs& args) {
    const auto row_of = transformed_rows<Traits>(scale, rows, args);
#pragma unroll
    for (int half = 0; half < 2; ++half) row[half] = row_of(0, half);
  }
};

struct NoRows {
  FP_DEVICE explicit NoRows(const auto&...) {}
};

// score = transform(score * scale, head, position, token) for each score; row_of(m, half) returns its row.
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

// score = cap of argument_of(score * scale, row, token) for each score.
template <class Traits, int token_tiles, class RowOf, class ArgumentOf>
FP_DEVICE void cap_each(float (&scores)[Shape<Traits>::row_tiles][token_tiles][4], i32 first_token, int lane,
                        RowOf&& row_of, const SoftCapOf<Traits>& cap, ArgumentOf&& argument_of) {
  transform_each<Traits>(scores, first_token, lane, row_of, argument_of);
#pragma unroll
  for (int m = 0; m < Shape<Traits>::row_tiles; ++m) cap.apply(scores[m]);
}

// Applies the variant's logit function; row_of(m, half) returns a row.
template <class Traits, int token_tiles, class RowOf>
FP_DEVICE void transform_by_logit(float (&scores)[Shape<Traits>::row_tiles][token_tiles][4], const WarpRows& rows,
                                  const VariantArgs& args, i32 first_token, RowOf&& row_of) {
  using Variant = typename Traits::Variant;
  const WorkItem& item = rows.item;
  const int lane = rows.lane;
  // A token past the end is masked later, but a variant may not load beyond the request.
  const auto known = [&](vm::Token token) {
    if constexpr (Variant::logit_loads_by_token) return min_of<i32>(token, item.kv_len - 1);
    if constexpr (!Variant::logit_loads_by_token) return token;
  };
  if constexpr (Variant::only_soft_cap) {
    cap_each<Traits>(scores, first_token, lane, row_of, SoftCapOf<Traits>(Variant::soft_cap(args)),
                     [](float argument, const TransformedRow&, vm::Token) { return argument; });
  } else if constexpr (Variant::ends_in_soft_cap) {
    const SoftCapOf<Traits> cap(Variant::soft_cap(args));
    cap_each<Traits>(
        scores, first_token, lane, row_of, cap, [&](float score, const TransformedRow& row, vm::Token token) {
          score = Variant::before_soft_cap(args, score, item.request, row.head, row.position, known(token));
          return score * cap.argument_scale;
        });
  } else {
    transform_each<Traits>(scores, first_token, lane, row_of,
                           [&](float score, const TransformedRow& row, vm::Token token) {
                             return Variant::logit(args, score, item.request, row.head, row.position, known(token));
                           });
  }
}

template <class Traits, int token_tiles>
FP_DEVICE void transform_scores(float (&scores)[Shape<Traits>::row_tiles][token_tiles][4], const auto& scale,
                                const WarpRows& rows, const VariantArgs& args, i32 first_token) {
  const auto row_of = transformed_rows<Traits>(scale, rows, args);
  if constexpr (Traits::Variant::has_logit) {
    transform_by_logit<Traits>(scores, rows, args, first_token, row_of);
  } else {
    transform_each<Traits>(scores, first_token, rows.lane, row_of,
                           [](float score, const TransformedRow&, vm::Token) { return score; });
  }
}

}  // namespace flashpage
