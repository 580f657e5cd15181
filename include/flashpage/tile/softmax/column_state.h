// Softmax in base 2 over the rows of transposed scores. The scores of a tile of eight packed rows are 64 tokens x 8
// rows for a warpgroup: a lane has rows lane % 4 * 2 and lane % 4 * 2 + 1 of each, and its warp's tokens lane / 4 and
// lane / 4 + 8. Sums stay per lane until the unit's end; all warps of a team, which share the tokens, have the same
// maxima.
#pragma once
#include "flashpage/ptx/named_barrier.h"
#include "flashpage/tile/load/latent_numbers.h"
#include "flashpage/tile/softmax/state_weight.h"

namespace flashpage {

// The maximum, or the sum, over the lanes that share a packed row.
FP_DEVICE float column_max(float x) {
#pragma unroll
  for (int other = 4; other < 32; other *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, other));
  return x;
}
FP_DEVICE float column_sum(float x) {
#pragma unroll
  for (int other = 4; other < 32; other *= 2) x += __shfl_xor_sync(0xffffffff, x, other);
  return x;
}

template <int tiles>
struct ColumnState {
  float maximum[tiles][2];  // of the lane's two rows of each tile
  float sum[tiles][2];

  FP_DEVICE void clear() {
#pragma unroll
    for (int n = 0; n < tiles; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        maximum[n][e] = ptx::negative_infinity();
        sum[n][e] = 0.f;
      }
  }

  // Raises the maxima if a score of the team exceeds one of them by 2^(above + headroom), and returns whether it did;
  // values must then be multiplied by `factor`. A maximum is the largest score less `above`. `top`: memory of the
  // team's warps, [warp][row]. `vote(outgrown)` returns whether any thread of the team has outgrown, and is a barrier
  // of the team.
  template <int rows>
  FP_DEVICE bool raise(const float (&scores)[tiles][4], float (&top)[4][rows], int warp, int lane,
                       float (&factor)[tiles][2], auto&& vote, float above = 0.f, float headroom = latent_headroom) {
    bool outgrown = false;
#pragma unroll
    for (int n = 0; n < tiles; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        outgrown = outgrown || fmaxf(scores[n][e], scores[n][e + 2]) - above > maximum[n][e] + headroom;
    if (!vote(outgrown)) return false;
#pragma unroll
    for (int n = 0; n < tiles; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float mine = column_max(fmaxf(scores[n][e], scores[n][e + 2]));
        if (lane < 4) top[warp][n * 8 + lane * 2 + e] = mine;
      }
    vote(false);
#pragma unroll
    for (int n = 0; n < tiles; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int row = n * 8 + lane % 4 * 2 + e;
        float next = maximum[n][e];
#pragma unroll
        for (int w = 0; w < 4; ++w) next = fmaxf(next, top[w][row] - above);
        factor[n][e] = state_weight(maximum[n][e], next);
        maximum[n][e] = next;
        sum[n][e] *= factor[n][e];
      }
    return true;
  }

  // Turns scores to probabilities. Sums have them times `in_sum`.
  FP_DEVICE void exponentiate(float (&scores)[tiles][4], float in_sum = 1.f) {
#pragma unroll
    for (int n = 0; n < tiles; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float origin = finite_or_zero(maximum[n][e]);
        scores[n][e] = ptx::exp2_approx(scores[n][e] - origin);
        scores[n][e + 2] = ptx::exp2_approx(scores[n][e + 2] - origin);
        sum[n][e] = fmaf(scores[n][e] + scores[n][e + 2], in_sum, sum[n][e]);
      }
  }
};

}  // namespace flashpage
