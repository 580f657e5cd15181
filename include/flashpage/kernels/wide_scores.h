// From scores to probabilities, in the kernels of many packed rows over latent rows: a warpgroup has 64 rows.
#pragma once
#include "flashpage/kernels/wide_units.h"
#include "flashpage/ptx/compiler.h"
#include "flashpage/ptx/convert.h"
#include "flashpage/ptx/math.h"
#include "flashpage/ptx/shared.h"
#include "flashpage/ptx/wgmma.h"
#include "flashpage/tile/load/latent_numbers.h"
#include "flashpage/tile/softmax/softmax.h"
#include "flashpage/tile/softmax/transform.h"

namespace flashpage {

// An operand of products in shared memory. Its opaque address keeps the compiler from holding the addresses of all
// products in registers, from block to block.
FP_DEVICE ptx::Matrix matrix_at(const auto& panels) { return {ptx::opaque(ptx::shared_address(&panels)), 0}; }
// As matrix_at, for panels that are in one place for all blocks: it takes no shuffle.
FP_DEVICE ptx::Matrix matrix_of_cta(const auto& panels) {
  return ptx::Matrix::of_cta(ptx::opaque(ptx::shared_address(&panels)));
}

// Hides the tokens of a block that a row does not see. `first`: the block's first token.
template <int chunks>
FP_DEVICE void hide_unseen(float (&scores)[1][chunks][4], const WidePlace& place, const WarpRows& of_warp, i32 first) {
  const Unit& unit = place.place.unit;
  if (first >= unit.all_begin && first + chunks * 8 <= unit.all_end) return;
  const WarpRows rows = of_warp.recomputed();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const TokenRange range = rows.visible(rows.row(0, half));
#pragma unroll
    for (int n = 0; n < chunks; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const i32 token = first + n * 8 + rows.lane % 4 * 2 + e;
        if (token < range.begin || token >= range.end) scores[0][n][half * 2 + e] = ptx::negative_infinity();
      }
  }
}

// Scales scores that the softmax cannot scale, and hides those of tokens that a row does not see.
template <class Traits, int chunks>
FP_DEVICE void prepare_scores(float (&scores)[1][chunks][4], const WidePlace& place, const WarpRows& of_warp,
                              i32 first) {
  if (scales_first<Traits>(place.scale)) {
#pragma unroll
    for (int n = 0; n < chunks; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[0][n][e] *= place.scale;
  }
  hide_unseen(scores, place, of_warp, first);
}

// As SoftmaxState, with less headroom, and for maxima that move in few rows at a time.
struct WideSoftmax : SoftmaxState<1> {
  template <int token_tiles>
  FP_DEVICE bool raise(const float (&scores)[1][token_tiles][4], float scale, float (&factor)[1][2]) {
    float top[1][2];
    bool outgrown = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      top[0][half] = lane_maximum(scores[0], half);
      outgrown = outgrown || top[0][half] * scale - latent_headroom > maximum[0][half];
    }
    if (!__any_sync(0xffffffff, outgrown)) return false;
    move_to(top, scale, factor);
    return true;
  }

  // Multiplies the values of the rows whose maxima moved, which are few.
  template <int value_tiles>
  FP_DEVICE static void rescale(float (&values)[1][value_tiles][4], const float (&factor)[1][2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (!__any_sync(0xffffffff, factor[0][half] != 1.f)) continue;
#pragma unroll
      for (int n = 0; n < value_tiles; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) values[0][n][half * 2 + e] *= factor[0][half];
    }
  }
};

// Probabilities as factors of the products of values.
template <class Cache, int steps>
FP_DEVICE void pack_probabilities(const float (&scores)[1][2 * steps][4], u32 (&probabilities)[steps][4]) {
#pragma unroll
  for (int step = 0; step < steps; ++step)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float (&pair)[4] = scores[0][2 * step + i / 2];
      probabilities[step][i] = ptx::pack2<Cache>(pair[i % 2 * 2], pair[i % 2 * 2 + 1]);
    }
}

}  // namespace flashpage
