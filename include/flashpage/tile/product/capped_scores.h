// Scores with a soft cap whose special functions overlap products.
#pragma once
#include "flashpage/tile/product/scores.h"
#include "flashpage/tile/softmax/transform.h"

namespace flashpage {

// Whether multiply_capped_keys serves a kernel: a cap by the card's tanh is its whole transform, and a tile has two
// halves for products of 16 tokens.
template <class Traits>
inline constexpr bool caps_between_products =
    approximates_tanh<Traits> && Traits::Variant::only_soft_cap && !has_formats<Traits> &&
    Shape<Traits>::key_bits == 16 && Traits::tile_kv >= 32;

// As multiply_keys and then transform_scores, but the compiler can spread the cap of the first half of the tokens over
// the products of the second half: at d 128 a cap costs 0.10 of an uncapped call's time in place of 0.20.
template <class Traits, class QueryFragment, class Between, int token_tiles>
FP_DEVICE void multiply_capped_keys(float (&scores)[Shape<Traits>::row_tiles][token_tiles][4], u32 key, float scale,
                                    const WarpRows& rows, const VariantArgs& args, QueryFragment&& query_fragment,
                                    Between&& between) {
  using S = Shape<Traits>;
  constexpr int half = token_tiles / 4 * 2;
  clear_scores(scores);
  multiply_key_tiles<Traits, 0, half>(scores, key, rows.lane, query_fragment, between);
  const auto row_of = transformed_rows<Traits>(scale, rows, args);
  float factor[S::row_tiles][2];
#pragma unroll
  for (int m = 0; m < S::row_tiles; ++m)
#pragma unroll
    for (int i = 0; i < 2; ++i) factor[m][i] = row_of(m, i).scale;
  const auto cap = [&](int begin, int end) {
#pragma unroll
    for (int m = 0; m < S::row_tiles; ++m)
#pragma unroll
      for (int n = begin; n < end; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) scores[m][n][e] = SoftCap<true>::of_argument(scores[m][n][e] * factor[m][e / 2]);
  };
  cap(0, half);
  multiply_key_tiles<Traits, half, token_tiles>(scores, key, rows.lane, query_fragment, [](int) {});
  cap(half, token_tiles);
}

}  // namespace flashpage
