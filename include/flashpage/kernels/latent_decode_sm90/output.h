// The end of a unit in latent_decode_sm90: values are divided by their row's sum and written.
#pragma once
#include "flashpage/kernels/latent_decode_sm90/shared.h"
#include "flashpage/ptx/compiler.h"
#include "flashpage/ptx/rcp.h"
#include "flashpage/tile/load/latent_numbers.h"
#include "flashpage/tile/merge/epilogue.h"
#include "flashpage/tile/softmax/column_state.h"
#include "flashpage/tile/softmax/softmax.h"

namespace flashpage {

// A team has the state of all rows, and writes its own blocks of value columns.
template <class Traits>
struct LatentOutput {
  using Warps = LatentWarps<Traits>;
  using Shared = LatentShared<Traits>;
  static constexpr int barrier = 1;  // name of all teams' barrier, before those of the teams
  static constexpr int tiles = Shared::rows / 8, blocks = Shared::blocks / Warps::teams;  // of a team
  using Values = float[blocks][tiles][4];

  Shared& shared;
  const AttentionParams& params;
  const WorkItem& item;
  const Unit& unit;
  int thread, team;
  int lane = threadIdx.x % 32, warp = thread / 32 % Warps::team;

  FP_DEVICE void write(ColumnState<tiles>& state, const Values& values) {
    const int name = barrier + 1 + team;
    share_sums(state);
    ptx::named_barrier(name, 128);
    const float value_scale = latent_value_scale<Traits>(params, item, unit);
#pragma unroll
    for (int n = 0; n < tiles; ++n) {
      float factor[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float total = sum_of_team(row_of(n, e));
        factor[e] = total == 0.f ? 0.f : value_scale * ptx::reciprocal_approx(total);
        if (team == 0 && warp == 0 && lane < 4) write_lse(row_of(n, e), state.maximum[n][e], total);
      }
#pragma unroll
      for (int block = 0; block < blocks; ++block) {
        const float (&tile)[4] = values[block][n];
        const LatentOutput here = recomputed();
        here.write_tile(team * blocks + block, n, tile[0] * factor[0], tile[1] * factor[1], tile[2] * factor[0],
                        tile[3] * factor[1]);
      }
    }
    ptx::named_barrier(name, 128);  // the sums are free again
  }

 private:
  FP_DEVICE int row_of(int n, int e) const { return n * 8 + lane % 4 * 2 + e; }

  FP_DEVICE void write_lse(int row, float maximum, float total) {
    if (row >= unit.num_rows) return;
    if (float* lse = lse_target(params, item, unit, row)) *lse = row_lse(maximum, total);
  }

  FP_DEVICE void share_sums(const ColumnState<tiles>& state) {
#pragma unroll
    for (int n = 0; n < tiles; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float sum = column_sum(state.sum[n][e]);
        if (lane < 4) shared.sum[team][warp][row_of(n, e)] = sum;
      }
  }

  FP_DEVICE float sum_of_team(int row) const {
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < Warps::team; ++w) sum += shared.sum[team][w][row];
    return sum;
  }

  // A copy with a lane that the compiler computes again, so that no row's place stays in registers.
  FP_DEVICE LatentOutput recomputed() const {
    LatentOutput again = *this;
    again.lane = static_cast<int>(ptx::opaque(static_cast<u32>(lane)));
    return again;
  }

  // The lane's four numbers of a tile: its two packed rows in two value columns, eight apart.
  FP_DEVICE void write_tile(int block, int n, float a, float b, float c, float d) const {
    const int column = block * 64 + warp * 16 + lane / 4;
    if (writes_fp32<Traits>(item)) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (row_of(n, e) >= unit.num_rows) continue;
        float* row = fp32_row(row_of(n, e));
        row[column] = e == 0 ? a : b;
        row[column + 8] = e == 0 ? c : d;
      }
    } else if constexpr (!is_same<typename Traits::Out, float>) {
      write_pair(column, n, a, b);
      write_pair(column + 8, n, c, d);
    }
  }

  // The offset of a partial alone takes no registers that out_offset would spill.
  FP_DEVICE float* fp32_row(int row) const {
    if constexpr (is_same<typename Traits::Out, float>)
      return fp32_rows<Traits>(params, item) + out_offset<Traits>(params, item, unit, row);
    return params.partial_out + static_cast<i64>(item.partial_row + row) * Traits::head_dim_vo;
  }

  // Lanes of neighbouring columns exchange a number, so that each has two columns of one packed row.
  FP_DEVICE void write_pair(int column, int n, float even, float odd) const {
    const int e = column % 2;
    const float given = __shfl_xor_sync(0xffffffff, e == 0 ? odd : even, 4);
    const int row = row_of(n, e);
    if (row >= unit.num_rows) return;
    const i64 offset = out_offset<Traits>(params, item, unit, row) + column - e;
    store_pair<Traits>(params, false, offset, e == 0 ? even : given, e == 0 ? given : odd);
  }
};

}  // namespace flashpage
