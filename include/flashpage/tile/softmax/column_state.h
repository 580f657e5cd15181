// Softmax in base 2 over the rows of transposed scores. The scores of a tile of eight packed rows are 64 tokens x 8
// rows for a warpgroup: a lane has rows lane % 4 * 2 and lane % 4 * 2 + 1 of each, and its warp's tokens lane / 4 and
// lane / 4 + 8. Sums stay per lane until the unit's end; all warps of a team, which share the tokens, have the same
// maxima.
#pragma once
#include "flashpage/ptx/convert.h"
#include "flashpage/ptx/stmatrix.h"
#include "flashpage/tile/load/latent_numbers.h"
#include "flashpage/tile/softmax/state_weight.h"
#include "flashpage/tile/unit.h"

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

  // Rows begin with their sinks, each in one lane of the team; maxima are those of all lanes. They begin `lowered` (in
  // base 2) below the sinks, and sums are multiplied to match.
  FP_DEVICE void begin_with_sinks(const AttentionParams& params, const Unit& unit, int warp, int lane,
                                  float lowered = 0.f) {
#pragma unroll
    for (int n = 0; n < tiles; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int row = n * 8 + lane % 4 * 2 + e;
        if (row >= unit.num_rows) continue;
        const float sink = params.sinks[unpack_row(params, unit.kv_head, unit.first_row + row).head] * log2_e;
        maximum[n][e] = sink - lowered;
        sum[n][e] = warp == 0 && lane < 4 && sink != ptx::negative_infinity() ? exp2f(lowered) : 0.f;
      }
  }

  // As the function of this name (tile/softmax/absent_rows.h).
  FP_DEVICE void ignore_absent_rows(int num_rows, int lane) {
#pragma unroll
    for (int n = 0; n < tiles; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (n * 8 + lane % 4 * 2 + e >= num_rows) maximum[n][e] = -ptx::negative_infinity();
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

// Hides the tokens that causal and window hide from a row, and those that the unit does not have. `first`: the token of
// the warp's first one.
template <int tiles>
FP_DEVICE void mask_columns(float (&scores)[tiles][4], const AttentionParams& params, const WorkItem& item,
                            const Unit& unit, i32 first, int lane) {
#pragma unroll
  for (int n = 0; n < tiles; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const i32 row = min_of(n * 8 + lane % 4 * 2 + e, unit.num_rows - 1);
      const PackedRow at = unpack_row(params, unit.kv_head, unit.first_row + row);
      const TokenRange range = visible_range(params, item, query_position(item, at.row));
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const i32 token = first + h * 8 + lane / 4;
        if (token < range.begin || token >= range.end) scores[n][h * 2 + e] = ptx::negative_infinity();
      }
    }
}

// Stores the warp's probabilities of the tiles n and n + 1 as a product reads P^T: a row for each packed row, with the
// tokens side by side. `tile`: where a Rows begins.
template <class Number, class Rows, int tiles>
FP_DEVICE void store_columns(u32 tile, const float (&scores)[tiles][4], int n, int warp, int lane) {
  u32 pairs[4];  // tokens 0 to 7 and 8 to 15 of the warp, for two tiles of packed rows
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float (&score)[4] = scores[n + i / 2];
    pairs[i] = ptx::pack2<Number>(score[i % 2 * 2], score[i % 2 * 2 + 1]);
  }
  const int row = n * 8 + lane / 16 * 8 + lane % 8, chunk = warp * 2 + lane / 8 % 2;
  ptx::stmatrix_x4_trans(tile + Rows::chunk_offset(row, chunk), pairs);
}

}  // namespace flashpage
