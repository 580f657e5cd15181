// Scores with a soft cap whose special functions overlap products.
#pragma once
#include "flashpage/tile/product/scores.h"
#include "flashpage/tile/softmax/transform.h"

namespace flashpage {

// Whether multiply_capped_keys serves a kernel: a cap by the card's tanh is its whole transform, a tile has two parts
// for products of 16 tokens, and there are registers for the factors.
template <class Traits>
inline constexpr bool splits_capped_scores =
    approximates_tanh<Traits> && Traits::Variant::only_soft_cap && !has_formats<Traits> &&
    Shape<Traits>::key_bits == 16 && Shape<Traits>::warp_tokens >= 32 && Traits::head_dim_vo <= 128;

// As multiply_keys and then transform_scores, but the compiler can spread the caps of the first tokens over the
// products of the others. An H200, d 128, 4 x 4k: 1,684 us; one product, then all caps: 1,727; scales of heads loaded
// in each tile's transform: 1,882. At d 256 it spills (docs/tried.md).
template <class Traits, class QueryFragment, class Between, int token_tiles>
FP_DEVICE void multiply_capped_keys(float (&scores)[Shape<Traits>::row_tiles][token_tiles][4], u32 key, float scale,
                                    const WarpRows& rows, const VariantArgs& args, QueryFragment&& query_fragment,
                                    Between&& between) {
  using S = Shape<Traits>;
  constexpr int first_part = token_tiles / 4 * 2;
  float factor[S::row_tiles][2];
#pragma unroll
  for (int m = 0; m < S::row_tiles; ++m)
#pragma unroll
    for (int i = 0; i < 2; ++i) factor[m][i] = first_scale_of<Traits>(scale, args);
  if (__any_sync(0xffffffff, scales_heads(rows.params))) {
#pragma unroll
    for (int m = 0; m < S::row_tiles; ++m)
#pragma unroll
      for (int i = 0; i < 2; ++i) factor[m][i] *= head_scale_of(rows.params, rows.item, rows.row(m, i).head);
  }
  clear_scores(scores);
  multiply_key_tiles<Traits, 0, first_part>(scores, key, rows.lane, query_fragment, between);
  const auto cap = [&](int begin, int end) {
#pragma unroll
    for (int m = 0; m < S::row_tiles; ++m)
#pragma unroll
      for (int n = begin; n < end; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) scores[m][n][e] = SoftCap<true>::of_argument(scores[m][n][e] * factor[m][e / 2]);
  };
  cap(0, first_part);
  multiply_key_tiles<Traits, first_part, token_tiles>(scores, key, rows.lane, query_fragment, [](int) {});
  cap(first_part, token_tiles);
}

}  // namespace flashpage
