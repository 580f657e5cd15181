// The end of a unit in latent_wide_sm90: writes a warpgroup's half of the columns to the output or to the partials.
#pragma once
#include "flashpage/kernels/latent_wide_sm90/shared.h"
#include "flashpage/ptx/convert.h"
#include "flashpage/ptx/rcp.h"
#include "flashpage/tile/load/latent_numbers.h"
#include "flashpage/tile/merge/epilogue.h"

namespace flashpage {

template <class Traits>
struct WideOutput {
  using Shared = WideShared<Traits>;
  static constexpr int columns = Traits::head_dim_vo / 2, tiles = columns / 8;  // of a warpgroup
  using Values = float[1][tiles][4];

  const AttentionParams& params;
  const Place& place;
  int column_half;
  int first_row;  // the lane's, in the unit; the second one is eight rows after it
  int lane;

  // `sums`: of the lane's two rows.
  FP_DEVICE void write(const Values& values, const float2& sums) const {
    const WorkItem& item = place.item;
    const Unit& unit = place.unit;
    const float value_scale = latent_value_scale<Traits>(params, item, unit);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + half * 8;
      const float total = half == 0 ? sums.x : sums.y;
      const float factor = total == 0.f ? 0.f : value_scale * ptx::reciprocal_approx(total);
      const bool exists = row < unit.num_rows;
      const i64 offset = out_offset<Traits>(params, item, unit, row) + column_half * columns;
      if (writes_fp32<Traits>(item)) {
        store_fp32_tiles<0, tiles>(values[0], half, lane, factor, fp32_rows<Traits>(params, item) + offset, exists);
      } else if constexpr (!is_same<typename Traits::Out, float>) {
        write_row(values, half, factor, static_cast<typename Traits::Out*>(params.out) + offset, exists);
      }
    }
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
