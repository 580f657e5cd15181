// The end of a unit in latent_decode_sm90: the teams' states are combined, and the rows are written.
#pragma once
#include "flashpage/kernels/latent_decode_sm90/shared.h"
#include "flashpage/kernels/latent_decode_sm90/state.h"
#include "flashpage/ptx/compiler.h"
#include "flashpage/ptx/rcp.h"
#include "flashpage/tile/merge/epilogue.h"
#include "flashpage/tile/softmax/softmax.h"

namespace flashpage {

// Each team writes half of the blocks of value columns, for which the other hands its values over block by block.
template <class Traits>
struct LatentOutput {
  using Warps = LatentWarps<Traits>;
  using Shared = LatentShared<Traits>;
  static constexpr int barrier = 1;  // name
  static constexpr int threads = 32 * Warps::computing, tiles = Shared::rows / 8;
  static constexpr int blocks = Shared::blocks / Warps::column_teams;  // of a team
  static constexpr int own = blocks / Warps::token_teams;
  using Values = float[blocks][tiles][4];

  Shared& shared;
  const AttentionParams& params;
  const WorkItem& item;
  const Unit& unit;
  int thread, team, rank, first_row, first_block;
  int lane = threadIdx.x % 32, warp = thread / 32 % Warps::team;

  FP_DEVICE void write(ColumnState<tiles>& state, const Values& values) {
    if constexpr (Warps::token_teams == 1) {
      write_alone(state, values);
    } else {
      write_together(state, values);
    }
  }

 private:
  // A team that has all tokens of its rows, or of its columns.
  FP_DEVICE void write_alone(ColumnState<tiles>& state, const Values& values) {
    const int name = barrier + 1 + team;
    hand_state_over(state);
    ptx::named_barrier(name, 128);
    const float value_scale = value_scale_of(params, unit.kv_head);
#pragma unroll
    for (int n = 0; n < tiles; ++n) {
      float factor[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float total = sum_of_team(team, local_row(n, e));
        factor[e] = total == 0.f ? 0.f : value_scale * ptx::reciprocal_approx(total);
        if (first_block == 0 && warp == 0 && lane < 4) write_lse(row_of(n, e), state.maximum[n][e], total);
      }
#pragma unroll
      for (int block = 0; block < blocks; ++block) {
        const float (&tile)[4] = values[block][n];
        const LatentOutput here = recomputed();
        here.write_tile(first_block + block, n, tile[0] * factor[0], tile[1] * factor[1], tile[2] * factor[0],
                        tile[3] * factor[1]);
      }
    }
    ptx::named_barrier(name, 128);  // the sums are free again
  }

  FP_DEVICE void write_together(ColumnState<tiles>& state, const Values& values) {
    hand_state_over(state);
    ptx::named_barrier(barrier, threads);
    float weight[2][tiles][2];  // of this team's values and of the other's, divided by the row's sum
    weigh(state, weight);
#pragma unroll
    for (int i = 0; i < own; ++i) {
#pragma unroll
      for (int n = 0; n < tiles; ++n) {
        const auto given = [&](int e) { return team == 0 ? values[own + i][n][e] : values[i][n][e]; };
        shared.exchange[team][n][thread % 128] = make_float4(given(0), given(1), given(2), given(3));
      }
      ptx::named_barrier(barrier, threads);
      const int block = team * own + i;
#pragma unroll
      for (int n = 0; n < tiles; ++n) {
        const float4 theirs = shared.exchange[1 - team][n][thread % 128];
        const auto mine = [&](int e) { return team == 0 ? values[i][n][e] : values[own + i][n][e]; };
        recomputed().write_tile(block, n, sum_of(mine(0), theirs.x, weight, n, 0),
                                sum_of(mine(1), theirs.y, weight, n, 1), sum_of(mine(2), theirs.z, weight, n, 0),
                                sum_of(mine(3), theirs.w, weight, n, 1));
      }
      ptx::named_barrier(barrier, threads);  // the exchange is free again
    }
  }

  FP_DEVICE int local_row(int n, int e) const { return n * 8 + lane % 4 * 2 + e; }
  FP_DEVICE int row_of(int n, int e) const { return first_row + local_row(n, e); }

  FP_DEVICE void write_lse(int row, float maximum, float total) {
    if (row >= unit.num_rows) return;
    if (float* lse = lse_target(params, item, unit, row)) *lse = row_lse(maximum, total);
  }

  FP_DEVICE void hand_state_over(const ColumnState<tiles>& state) {
#pragma unroll
    for (int n = 0; n < tiles; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float sum = column_sum(state.sum[n][e]);
        if (lane >= 4) continue;
        shared.sum[team][warp][local_row(n, e)] = sum;
        if (warp == 0) shared.maximum[team][local_row(n, e)] = state.maximum[n][e];
      }
  }

  FP_DEVICE float sum_of_team(int which, int row) const {
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < Warps::team; ++w) sum += shared.sum[which][w][row];
    return sum;
  }

  FP_DEVICE void weigh(const ColumnState<tiles>& state, float (&weight)[2][tiles][2]) {
    const float value_scale = value_scale_of(params, unit.kv_head);
    const int first = (team + rank) % 2;  // the team of rank 0
#pragma unroll
    for (int n = 0; n < tiles; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int row = local_row(n, e);
        const float mine = state.maximum[n][e], theirs = shared.maximum[1 - team][row], common = fmaxf(mine, theirs);
        const float of_first = state_weight(shared.maximum[first][row], common);
        const float of_second = state_weight(shared.maximum[1 - first][row], common);
        const float total = of_first * sum_of_team(first, row) + of_second * sum_of_team(1 - first, row);
        const float inverse = total == 0.f ? 0.f : value_scale * ptx::reciprocal_approx(total);
        weight[0][n][e] = state_weight(mine, common) * inverse;
        weight[1][n][e] = state_weight(theirs, common) * inverse;
        if (team == 0 && warp == 0 && lane < 4) write_lse(row, common, total);
      }
  }

  // In the order of ranks, so that a result does not depend on which team began.
  FP_DEVICE float sum_of(float mine, float theirs, const float (&weight)[2][tiles][2], int n, int e) const {
    return rank == 0 ? fmaf(theirs, weight[1][n][e], mine * weight[0][n][e])
                     : fmaf(mine, weight[0][n][e], theirs * weight[1][n][e]);
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
    if (item.partial_row >= 0) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (row_of(n, e) >= unit.num_rows) continue;
        float* row = params.partial_out + static_cast<i64>(item.partial_row + row_of(n, e)) * Traits::head_dim_vo;
        row[column] = e == 0 ? a : b;
        row[column + 8] = e == 0 ? c : d;
      }
    } else {
      write_pair(column, n, a, b);
      write_pair(column + 8, n, c, d);
    }
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
