// The end of a unit in latent_wide_sm90: writes a warpgroup's half of the columns to the output or to the partials.
#pragma once
#include "flashpage/kernels/latent_wide_sm90/shared.h"
#include "flashpage/ptx/compiler.h"
#include "flashpage/ptx/rcp.h"
#include "flashpage/tile/merge/epilogue.h"
#include "flashpage/tile/softmax/softmax.h"

namespace flashpage {

template <class Traits>
struct WideOutput {
  using Shared = WideShared<Traits>;
  static constexpr int columns = Traits::head_dim_vo / 2, tiles = columns / 8;  // of a warpgroup
  using Values = float[1][tiles][4];

  Shared& shared;
  const AttentionParams& params;
  const Place& place;
  int group;       // warpgroup
  int row_in_cta;  // the lane's first row; the second one is eight rows after it
  int first_row;   // of the CTA, in the unit
  int lane;

  // `meet(phase)`: a barrier of the two warps that have the same rows, which they use for nothing else.
  FP_DEVICE void write(const SoftmaxState<1>& state, const Values& values, auto&& meet) const {
    const WorkItem& item = place.item;
    const Unit& unit = place.unit;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = quad_sum(state.sum[0][half]);
      if (lane % 4 == 0) shared.sums[group][row_in_cta + half * 8] = sum;
    }
    meet(0);
    const float value_scale = value_scale_of(params, item, unit.kv_head);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + row_in_cta + half * 8;
      const float total = shared.sums[0][row_in_cta + half * 8] + shared.sums[1][row_in_cta + half * 8];
      const float factor = total == 0.f ? 0.f : value_scale * ptx::reciprocal_approx(total);
      const bool exists = row < unit.num_rows;
      if (exists && group == 0 && lane % 4 == 0) {
        if (float* lse = lse_target(params, item, unit, row)) *lse = row_lse(state.maximum[0][half], total);
      }
      const i64 offset = out_offset<Traits>(params, item, unit, row) + group * columns;
      if (writes_fp32<Traits>(item)) {
        store_fp32_tiles<0, tiles>(values[0], half, lane, factor, fp32_rows<Traits>(params, item) + offset, exists);
      } else if constexpr (!is_same<typename Traits::Out, float>) {
        write_row(values, half, factor, static_cast<typename Traits::Out*>(params.out) + offset, exists);
      }
    }
    meet(1);  // the sums are free again
  }

 private:
  // Neighbouring lanes exchange a pair of two tiles, so that each has four columns in sequence: half of the stores, and
  // whole sectors of 32 bytes.
  FP_DEVICE void write_row(const Values& values, int half, float factor, typename Traits::Out* row, bool exists) const {
    const bool is_odd = lane % 2 != 0;
    typename Traits::Out* const mine = row + (is_odd ? 8 : 0) + lane % 4 / 2 * 4;
#pragma unroll
    for (int n = 0; n < tiles; n += 2) {
      u32 pair[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float (&tile)[4] = values[0][n + i];
        pair[i] = ptx::pack2<typename Traits::Out>(tile[half * 2] * factor, tile[half * 2 + 1] * factor);
      }
      const u32 given = exchange(is_odd ? pair[0] : pair[1]);
      if (exists)
        *reinterpret_cast<uint2*>(mine + n * 8) = is_odd ? make_uint2(given, pair[1]) : make_uint2(pair[0], given);
    }
  }
  FP_DEVICE u32 exchange(u32 word) const { return __shfl_sync(0xffffffff, word, lane ^ 1); }
};

}  // namespace flashpage
