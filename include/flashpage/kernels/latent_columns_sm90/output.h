// The end of a unit in latent_columns_sm90: writes the CTA's half of the columns to the output or to the partials.
#pragma once
#include "flashpage/kernels/latent_columns_sm90/shared.h"
#include "flashpage/ptx/rcp.h"
#include "flashpage/tile/load/latent_numbers.h"
#include "flashpage/tile/merge/epilogue.h"
#include "flashpage/tile/softmax/softmax.h"

namespace flashpage {

template <class Traits>
struct ColumnsOutput {
  using Shared = ColumnsShared<Traits>;
  static constexpr int columns = Shared::Tile::value_columns, tiles = columns / 8;  // of a CTA
  using Values = float[1][tiles][4];

  Shared& shared;
  const AttentionParams& params;
  const Place& place;
  int first_row;  // of the lane, in the unit; the second one is eight rows after it
  int lane;

  FP_DEVICE void write(const SoftmaxState<1>& state, const Values& values) const {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      write_row_of<0, tiles>(values, half, state.maximum[0][half], quad_sum(state.sum[0][half]), true);
  }

  // Merges the states of both warpgroups, which have the same rows. Each gives the other one the other half of its
  // columns, and writes its own half. A warpgroup without blocks has nothing to give, and may not: the other CTA may
  // already send it scores of the next unit. `units`: how many were before this one.
  template <int group>
  FP_DEVICE void write_half(SoftmaxState<1>& state, Values& values, int blocks, u32 units) const {
    const bool gives = blocks > group, takes = blocks > 1 - group;
    constexpr int half_tiles = tiles / 2, given = (1 - group) * half_tiles, own = group * half_tiles;
    constexpr int rounds = 2, round_tiles = half_tiles / rounds, meetings = 1 + 2 * rounds;
    static_assert(round_tiles <= Shared::tokens / 8, "values pass through the memory of scores");
    const int thread = threadIdx.x % 128;
    u32 phase = units * meetings;  // of the two warps that have the same rows
    const auto meet = [&] { meet_at(shared.met[thread / 32], phase++); };
    float sum[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum[half] = quad_sum(state.sum[0][half]);
      if (lane % 4 == 0) shared.states[group][first_row + half * 8] = make_float2(state.maximum[0][half], sum[half]);
    }
    meet();
    float factor[1][2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 other = shared.states[1 - group][first_row + half * 8];
      const float top = fmaxf(state.maximum[0][half], other.x);
      factor[0][half] = state_weight(state.maximum[0][half], top);
      sum[half] = sum[half] * factor[0][half] + other.y * state_weight(other.x, top);
      state.maximum[0][half] = top;
    }
    state.rescale(values, factor);
#pragma unroll
    for (int round = 0; round < rounds; ++round) {
#pragma unroll
      for (int i = 0; i < round_tiles && gives; ++i) {
        const float (&tile)[4] = values[0][given + round * round_tiles + i];
        shared.received[group][i][thread] = make_float4(tile[0], tile[1], tile[2], tile[3]);
      }
      meet();
#pragma unroll
      for (int i = 0; i < round_tiles && takes; ++i) {
        const float4 other = shared.received[1 - group][i][thread];
        float (&tile)[4] = values[0][own + round * round_tiles + i];
        tile[0] += other.x;
        tile[1] += other.y;
        tile[2] += other.z;
        tile[3] += other.w;
      }
      meet();
    }
#pragma unroll
    for (int half = 0; half < 2; ++half)
      write_row_of<own, half_tiles>(values, half, state.maximum[0][half], sum[half], group == 0);
  }

 private:
  // Writes `count` tiles of eight columns of one of the lane's rows.
  template <int first_tile, int count>
  FP_DEVICE void write_row_of(const Values& values, int half, float maximum, float total, bool writes_lse) const {
    const WorkItem& item = place.item;
    const Unit& unit = place.unit;
    const int row = first_row + half * 8, rank = static_cast<int>(ptx::cluster_rank());
    const float factor =
        total == 0.f ? 0.f : latent_value_scale<Traits>(params, item, unit) * ptx::reciprocal_approx(total);
    const bool exists = row < unit.num_rows;
    if (exists && writes_lse && rank == 0 && lane % 4 == 0) {
      if (float* lse = lse_target(params, item, unit, row)) *lse = row_lse(maximum, total);
    }
    const i64 offset = out_offset<Traits>(params, item, unit, row) + rank * columns;
    if (writes_fp32<Traits>(item)) {
      float* const to = fp32_rows<Traits>(params, item) + offset;
      store_fp32_tiles<first_tile, count>(values[0], half, lane, factor, to, exists);
    } else if constexpr (!is_same<typename Traits::Out, float>) {
      using Out = typename Traits::Out;
      Out* const to = static_cast<Out*>(params.out) + offset;
      store_tiles<Out, first_tile, count>(values[0], half, lane, factor, to, exists);
    }
  }
};

}  // namespace flashpage
