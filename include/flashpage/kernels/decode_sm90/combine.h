// The end of a unit in decode_sm90: combines the teams' states, and writes or merges the rows.
#pragma once
#include "flashpage/kernels/decode_sm90/shared.h"
#include "flashpage/ptx/atomic.h"
#include "flashpage/ptx/named_barrier.h"
#include "flashpage/ptx/rcp.h"
#include "flashpage/tile/merge/arrival_merge.h"
#include "flashpage/tile/merge/epilogue.h"
#include "flashpage/tile/product/values.h"
#include "flashpage/tile/softmax/softmax.h"
#include "flashpage/tile/trace.h"

namespace flashpage {

// Rows go to one of three destinations: the output; the partials of a cut unit, which the CTA of its last piece merges,
// or the merge kernel if there are many; or the other CTAs of the cluster, if they have all other pieces of the unit
// (rows are then sent before they are divided by their sum). If a piece finds all others done (most do, because CTAs
// end with a request that others began), it skips the counter of arrivals, which saves 0.7 us.
//
// Every computing warp constructs this at the start of a unit, so that loads which the end needs have completed by
// then.
template <class Traits>
struct DecodeCombine {
  using S = Shape<Traits>;
  using Warps = DecodeWarps<Traits>;
  using Shared = DecodeShared<Traits>;
  using Out = typename Traits::Out;
  static constexpr int threads = S::threads, teams = Warps::teams;
  static constexpr int barrier = 1;                            // name
  static constexpr bool has_registers = S::value_tiles <= 16;  // to load more early and to do more at once

  Shared& shared;
  const AttentionParams& params;
  const SlottedPlace& slotted;
  const WorkItem& item;
  const Unit& unit;
  int rank;       // the team's rank in this unit, in whose order states are summed
  int first_row;  // first row of the warp
  int part;       // part of the value columns that the warp has
  int thread, lane = threadIdx.x % 32;
  int team = thread / 32 / Warps::team, place = thread / 32 % Warps::team;  // team, and the warp's place in it
  i64 first_offset = 0;  // of the lane's first row, in the output or the partials
  i32 merge_field = 0;   // one field of the MergeItem in each lane
  int log_pieces = -1;   // if the cluster merges the unit
  int piece = 0;         // if the cluster merges the unit

  FP_DEVICE DecodeCombine(Shared& shared, const AttentionParams& params, const SlottedPlace& slotted, const Unit& unit,
                          int rank, int first_row, int part, int thread)
      : shared(shared),
        params(params),
        slotted(slotted),
        item(slotted.place.item),
        unit(unit),
        rank(rank),
        first_row(first_row),
        part(part),
        thread(thread) {
    if (has_registers) first_offset = out_offset<Traits>(params, item, unit, row_of_lane(0));
    if (is_piece()) merge_field = __ldg(reinterpret_cast<const i32*>(slotted.merge) + lane % 8);
  }

  FP_DEVICE void run(SoftmaxState<1>& state, float (&values)[S::value_tiles][4]) {
    run([&](int half) { hand_over(state, values, half); });
  }

  // hand_over(half) writes half of the warp's rows to the exchange, in the order of its lanes.
  template <class HandOver>
  FP_DEVICE void run(HandOver&& hand_over) {
    if constexpr (Shared::has_mailbox) {
      if (is_piece() && slotted.in_cluster) {
        log_pieces = 31 - __clz(__shfl_sync(0xffffffff, merge_field, 7));  // MergeItem::num_partials
        piece = item.piece;
        if (thread == 0) cluster().expect();
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (half * 8 >= unit.num_rows) break;
      if (half > 0) ptx::named_barrier(barrier, threads);  // all warps have read the exchange
      hand_over(half);
      ptx::named_barrier(barrier, threads);
      write_rows(half);
    }
    if (thread == 0) stamp<Traits>(params, Stamp::written);
    if (sends()) {
      if constexpr (Shared::has_mailbox) cluster().run(thread, threads);
    } else if (is_piece()) {
      merge();
    } else {
      ptx::named_barrier(barrier, threads);
    }
  }

 private:
  FP_DEVICE bool is_piece() const { return item.partial_row >= 0; }
  FP_DEVICE bool sends() const { return Shared::has_mailbox && log_pieces >= 0; }
  FP_DEVICE ClusterMerge<Traits> cluster() const { return {shared.mailbox, params, item, unit, piece, log_pieces}; }
  FP_DEVICE int row_of_lane(int half) const { return first_row + half * 8 + lane / 4; }

  // Writes half of the warp's rows to the exchange, in the order of its lanes.
  FP_DEVICE void hand_over(const SoftmaxState<1>& state, const float (&values)[S::value_tiles][4], int half) {
    const float sum = quad_sum(state.sum[0][half]);
    if (lane % 4 == 0 && part == 0) {
      shared.maximum[row_of_lane(half)][rank] = state.maximum[0][half];
      shared.sum[row_of_lane(half)][rank] = sum;
    }
    const int e = half * 2;
#pragma unroll
    for (int n = 0; n < S::value_tiles; n += 2)
      shared.exchange[rank][place][n / 2][lane] =
          make_float4(values[n][e], values[n][e + 1], values[n + 1][e], values[n + 1][e + 1]);
  }

  // Combines these rows over all teams, for the columns that this team sums: pairs of n8 tiles.
  FP_DEVICE void write_rows(int half) {
    constexpr int pairs = S::value_tiles / 2, own = ceil_div(pairs, teams);
    const int row = row_of_lane(half);
    if (row >= unit.num_rows) return;
    float weight[teams], maximum = ptx::negative_infinity(), total = 0.f;
#pragma unroll
    for (int t = 0; t < teams; ++t) maximum = fmaxf(maximum, shared.maximum[row][t]);
#pragma unroll
    for (int t = 0; t < teams; ++t) {
      weight[t] = state_weight(shared.maximum[row][t], maximum);
      total += weight[t] * shared.sum[row][t];
    }
    float inverse = 0.f;
    if (!sends())
      inverse = total == 0.f ? 0.f : out_factor_of<Traits>(params, item, unit.kv_head) * ptx::reciprocal_approx(total);
    const i64 offset = has_registers && half == 0 ? first_offset : out_offset<Traits>(params, item, unit, row);
#pragma unroll(has_registers ? own : 1)
    for (int i = 0; i < own; ++i) {
      const int pair = team * own + i;
      if (pair >= pairs) break;
      float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
      for (int t = 0; t < teams; ++t) sum = add_scaled(sum, shared.exchange[t][place][pair][lane], weight[t]);
      if (!sends()) {
        write_pair(offset, pair, scaled(sum, inverse));
      } else if constexpr (Shared::has_mailbox) {
        cluster().send(row, part * pairs + pair, lane % 4, sum, maximum, total);
      }
    }
    if (sends() || team > 0 || part > 0 || lane % 4 > 0) return;
    if (float* lse = lse_target(params, item, unit, row)) *lse = row_lse(maximum, total);
  }

  // Writes a lane's columns of two n8 tiles (for_each_column_of_pair).
  FP_DEVICE void write_pair(i64 offset, int pair, const float4& v) const {
    const float tiles[2][4] = {{v.x, v.y}, {v.z, v.w}};
    for_each_column_of_pair<Traits>(tiles[0], tiles[1], pair, 0, lane, [&](int column, float first, float second) {
      column += pair * 16;
      if (column >= S::value_columns || part * S::value_columns + column >= Traits::head_dim_vo) return;
      store_pair<Traits>(params, is_piece(), offset + part * S::value_columns + column, first, second);
    });
  }

  // Whether the merge kernel merges the unit: one CTA would take long for many pieces of many rows.
  FP_DEVICE bool leaves(const MergeItem& merge) const {
    const i32 jobs = merge.num_rows * ArrivalMerge<Traits, Warps::computing>::jobs_a_row;
    return params.most_merge_rounds > 0 && merge_rounds(merge.num_partials, jobs) > params.most_merge_rounds;
  }

  FP_DEVICE void merge() {
    MergeItem merge;
    i32* fields = reinterpret_cast<i32*>(&merge);
#pragma unroll
    for (int i = 0; i < 8; ++i) fields[i] = __shfl_sync(0xffffffff, merge_field, i);
    // Barriers have ordered the CTA's own rows before this.
    if (thread == 0) {
      shared.others_were_done = ptx::load_acquire_shared(&slotted.others_are_done);
      if (shared.others_were_done) *slotted.arrivals = 0;
    }
    ptx::named_barrier(barrier, threads);
    if (!shared.others_were_done) {
      if (thread == 0) shared.is_last_piece = !leaves(merge) && is_last_arrival(slotted.arrivals, merge.num_partials);
      ptx::named_barrier(barrier, threads);
      if (!shared.is_last_piece) return;
    }
    ArrivalMerge<Traits, Warps::computing>{params, merge, lane}.run(shared.merge_sums, thread / 32);
  }
};

}  // namespace flashpage
