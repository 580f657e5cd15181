// The computing warps of decode_sm90.
#pragma once
#include "flashpage/kernels/decode_sm90_shared.h"
#include "flashpage/ptx/atomic.h"
#include "flashpage/ptx/fence.h"
#include "flashpage/ptx/named_barrier.h"
#include "flashpage/ptx/prefetch.h"
#include "flashpage/ptx/rcp.h"
#include "flashpage/tile/arrival_merge.h"
#include "flashpage/tile/epilogue.h"
#include "flashpage/tile/half_query.h"
#include "flashpage/tile/mask.h"
#include "flashpage/tile/query_fragments.h"
#include "flashpage/tile/rotated_keys.h"
#include "flashpage/tile/sinks.h"
#include "flashpage/tile/softmax.h"
#include "flashpage/tile/trace.h"
#include "flashpage/tile/values.h"

namespace flashpage {

template <class Traits>
struct DecodeCompute {
  using S = Shape<Traits>;
  using Warps = DecodeWarps<Traits>;
  using Shared = DecodeShared<Traits>;
  static constexpr int tokens = Shared::tokens;
  static constexpr int threads = S::threads;
  static constexpr int teams = Warps::teams;
  static constexpr int all_barrier = 1, team_barrier = 2;     // names; from team_barrier on one a team
  static constexpr int pairs = Traits::head_dim_vo / 2;       // of columns
  static constexpr bool early_target = S::value_tiles <= 16;  // registers allow it

  Shared& shared;
  const AttentionParams& params;
  const VariantArgs& args;
  int thread = threadIdx.x - Warps::loading * 32;
  int lane = threadIdx.x % 32;
  int warp = thread / 32;
  int team = warp / Warps::team;
  int first_row = warp % Warps::team / Traits::warps_v * S::rows_a_warp;
  int part = warp % Traits::warps_v;  // of the value columns
  u32 turn = 0;                       // slots before this unit

  FP_DEVICE DecodeCompute(Shared& shared, const AttentionParams& params, const VariantArgs& args)
      : shared(shared), params(params), args(args) {}

  // Of rotated keys; reads no global memory.
  FP_DEVICE void make_turns() {
    shared.turns.fill_frequencies(params, thread, threads);
    ptx::named_barrier(all_barrier, threads);
    shared.turns.fill_turns(thread, threads);
    ptx::named_barrier(all_barrier, threads);
  }

  FP_DEVICE void run() {
    if (thread == 0) stamp<Traits>(params, Stamp::start);
    prefetch_indices();
    for (u32 unit_turn = 0;; ++unit_turn) {
      shared.place_ring.wait_full(unit_turn);
      const SlottedPlace& place = shared.places[shared.place_ring.slot(unit_turn)];
      if (place.place.done) break;
      attend(place, shared.query[shared.place_ring.slot(unit_turn)]);
      turn += place.slots;
      __syncwarp();
      if (lane == 0) shared.place_ring.release(unit_turn);
    }
    if (thread == 0) {
      stamp<Traits>(params, Stamp::end);
      stamp<Traits>(params, Stamp::sm);
    }
  }

 private:
  // All CTAs together bring the page numbers into the L2 while the plan is read: the look-up behind it waits for less.
  FP_DEVICE void prefetch_indices() const {
    if constexpr (Traits::kv_source == KvSource::paged) {
      constexpr int line = 128 / sizeof(i32);
      const i64 step = static_cast<i64>(gridDim.x) * threads * line;
      for (i64 i = (static_cast<i64>(thread) * gridDim.x + blockIdx.x) * line; i < params.num_kv_indices; i += step)
        ptx::prefetch_to_l2(params.kv_indices + i);
    }
  }

  struct Nothing {};

  // Where two columns of a row go, and the row's LSE with the first two.
  struct Target {
    void* columns;
    float* lse;
  };

  struct Merging {
    bool is_piece;
    i32 field = 0;  // of the MergeItem, one a lane

    FP_DEVICE MergeItem item() const {
      MergeItem item;
      i32* fields = reinterpret_cast<i32*>(&item);
#pragma unroll
      for (int i = 0; i < 8; ++i) fields[i] = __shfl_sync(0xffffffff, field, i);
      return item;
    }
  };

  FP_DEVICE void attend(const SlottedPlace& slotted, u8* query_tile) {
    const WorkItem& item = slotted.place.item;
    const Unit unit = slotted.place.unit;
    const int slots = slotted.slots;
    // The team's place in this unit: sums go by it, so that their order does not depend on the units before.
    const int rank = (team - turn) % teams;
    // What the merge needs is asked for here: it must not be waited for at the unit's end.
    const Target first_target =
        early_target ? target_of(item, unit, row_of(thread / pairs, 0), thread % pairs * 2) : Target{};
    Merging merging;
    merging.is_piece = item.partial_row >= 0;
    if (merging.is_piece) merging.field = __ldg(reinterpret_cast<const i32*>(slotted.merge) + lane % 8);
    float values[S::row_tiles][S::value_tiles][4] = {};
    SoftmaxState<S::row_tiles> state;
    state.clear();
    if (rank == 0 && params.sinks) begin_with_sinks(state, params, item, unit, first_row, lane);
    float scale = score_scale_of<Traits>(params, unit);
    if constexpr (S::rotate) {
      turn_query<Traits>(query_tile, shared.turns, params, item, unit, thread);
      ptx::named_barrier(all_barrier, threads);
      scale /= Shared::Turns::key_scale;
    }
    using Query = QueryFragments<Traits, S::query_in_registers>;
    u32 query = Query::lane_address(ptx::shared_address(query_tile) + first_row * S::QueryRows::stride, lane);
    typename Query::Registers query_registers;
    Query::keep(query_registers, query, lane);
    if constexpr (!is_same<typename S::Product, typename S::Query>)
      scale *= to_half_query(reinterpret_cast<u32(&)[S::key_steps * 4]>(query_registers));
    auto query_fragment = [&](u32(&a)[S::row_tiles][4], int step) {
      Query::take(a, query_registers, query, lane, step);
    };

    for (int slot = rank; slot < slots; slot += teams) {
      const auto origin = turns_of(slotted.first_token + slot * tokens);
      shared.ring.wait_full(turn + slot);
      if (thread == 0) stamp_first<Traits>(params, Stamp::first_tile);
      u8* tile = shared.slots[shared.ring.slot(turn + slot)];
      u32 keys = ptx::shared_address(tile);
      i32 first = slotted.first_token + slot * tokens;
      if constexpr (Traits::loader == Loader::boxes) {
        if (first < unit.kv_begin || first + tokens > unit.kv_end) clear_values(tile + Shared::key_bytes, unit, first);
      }
      float scores[S::row_tiles][tokens / 8][4];
      auto nothing = [](int) {};
      if constexpr (S::rotate) {
        multiply_rotated_keys<Traits>(scores, keys, lane, query_fragment, shared.turns, origin);
      } else {
        multiply_keys<Traits>(scores, keys, lane, query_fragment, nothing);
      }
      transform_scores<Traits>(scores, scale, params, args, item, unit, first_row, first, lane);
      if (needs_mask<Traits>(unit, first, tokens))
        mask_scores<Traits>(scores, params, args, item, unit, first_row, first, lane);
      state.update(scores, values, softmax_scale_of<Traits>(scale));
      Probabilities<Traits, tokens / 8> probabilities(scores);
      multiply_values(values, probabilities, keys + Shared::key_bytes + part * S::ValueRows::tile_bytes, lane, nothing);
      __syncwarp();
      if (lane == 0) shared.ring.release(turn + slot);
    }
    if (thread == 0) stamp<Traits>(params, Stamp::last_tile);
    combine(state, values[0], slotted, unit, rank, merging, first_target);
  }

  // Of a slot's first token, ahead of the slot.
  FP_DEVICE auto turns_of(i32 first) const {
    if constexpr (S::rotate) {
      return SpreadTurns<Traits>(shared.turns, first, lane);
    } else {
      return Nothing{};
    }
  }

  // A box may bring tokens that the unit does not see, and leaves what was there before where it brings none: NaN
  // maybe, which a probability of zero would not hide.
  FP_DEVICE void clear_values(u8* tile, const Unit& unit, i32 first) {
    constexpr int chunks = Shared::value_bytes / tokens / 16, team_threads = 32 * Warps::team;
    for (int i = thread % team_threads; i < tokens * chunks; i += team_threads) {
      int row = i / chunks, chunk = i % chunks;
      if (first + row >= unit.kv_begin && first + row < unit.kv_end) continue;
      *reinterpret_cast<uint4*>(tile + chunk / 8 * (tokens * 128) + row * 128 + chunk % 8 * 16) =
          make_uint4(0, 0, 0, 0);
    }
    ptx::fence_before_bulk_copies();
    if constexpr (Warps::team == 1) {
      __syncwarp();
    } else {
#pragma unroll
      for (int t = 0; t < teams; ++t)  // constant names: racecheck loses every barrier of a kernel that computes one
        if (t == team) ptx::named_barrier(team_barrier + t, team_threads);
    }
  }

  // The teams' states into one, and out: to the output, or to the partials of a cut unit, whose last piece merges them.
  // A piece that finds all others done (most do, as CTAs end with a request that others began) merges at once, its own
  // partial still in shared memory: the same bits, 1.5 us sooner. Up to 8 rows, as the exchange has one half of them at
  // a time.
  FP_DEVICE void combine(SoftmaxState<S::row_tiles>& state, float (&values)[S::value_tiles][4],
                         const SlottedPlace& slotted, const Unit& unit, int rank, const Merging& merging,
                         const Target& first_target) {
    const WorkItem& item = slotted.place.item;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (half * 8 >= unit.num_rows) break;
      int row = first_row + half * 8 + lane / 4;
      float sum = quad_sum(state.sum[0][half]);
      if (lane % 4 == 0 && part == 0) {
        shared.maximum[row][rank] = state.maximum[0][half];
        shared.sum[row][rank] = sum;
      }
    }
    if (thread == 0) {
      shared.merges_now = merging.is_piece && unit.num_rows <= 8 && ptx::load_acquire_shared(&slotted.others_are_done);
    }
    bool merges_now = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (half * 8 >= unit.num_rows) break;
      if (first_row + half * 8 + lane / 4 < unit.num_rows) {
        float* mine = shared.exchange[rank][first_row / 2 + lane / 4];
        for_each_column_pair<Traits>(values, half, lane, [&](int at, float first, float second) {
          *reinterpret_cast<float2*>(mine + exchange_column(lane / 4, part * S::value_columns + at)) =
              make_float2(first, second);
        });
      }
      ptx::named_barrier(all_barrier, threads);
      merges_now = shared.merges_now;
      write_rows(item, unit, half, merges_now, first_target);
      ptx::named_barrier(all_barrier, threads);
    }
    if (thread == 0) stamp<Traits>(params, Stamp::written);
    if (merging.is_piece) merge_pieces(merging.item(), merges_now ? item.piece : -1, slotted.arrivals);
  }

  // `own`: the piece that is still in the exchange; -1: it went to the partials, and all may not be there yet.
  FP_DEVICE void merge_pieces(const MergeItem& merge, i32 own, u32* arrivals) {
    if (own < 0) {
      if (thread == 0) shared.is_last_piece = is_last_arrival(arrivals, merge.num_partials);
      ptx::named_barrier(all_barrier, threads);
      if (!shared.is_last_piece) return;
    } else if (thread == 0) {
      *arrivals = 0;
    }
    for (int half = 0; half * 8 < merge.num_rows; ++half)
      run_merge(merge, {min_of(Shared::exchange_rows, merge.num_rows), half, own, shared.exchange[0][0], shared.own_lse,
                        Shared::exchange_columns});
    if (own >= 0) ptx::named_barrier(all_barrier, threads);  // the exchange is free again
  }

  FP_DEVICE void run_merge(const MergeItem& merge, const MergeRound& round) {
    ArrivalMerge<Traits, Warps::computing>{params, merge, round, lane}.run(shared.merge_sums, warp);
  }

  FP_DEVICE Target target_of(const WorkItem& item, const Unit& unit, int row, int column) const {
    i64 offset = out_offset<Traits>(params, item, unit, row) + column;
    bool partial = item.partial_row >= 0;
    return {partial ? static_cast<void*>(params.partial_out + offset)
                    : static_cast<void*>(static_cast<typename Traits::Out*>(params.out) + offset),
            column == 0 ? lse_target(params, item, unit, row) : nullptr};
  }

  // Row `i` of the exchange, as a row of the unit.
  FP_DEVICE static int row_of(int i, int half) { return i / 8 * 16 + half * 8 + i % 8; }

  // Rows of one half of the m16 tiles; `keep`: into the first team's exchange instead.
  FP_DEVICE void write_rows(const WorkItem& item, const Unit& unit, int half, bool keep, const Target& first_target) {
    const int rows = min_of(Shared::exchange_rows, unit.num_rows);
    float value_scale = value_scale_of(params, unit.kv_head);
    for (int i = thread; i < rows * pairs; i += threads) {
      int from = i / pairs, at = i % pairs * 2, row = row_of(from, half);
      if (row >= unit.num_rows) continue;
      float2* kept = reinterpret_cast<float2*>(&shared.exchange[0][from][exchange_column(from, at)]);
      float maxima[teams], maximum = ptx::negative_infinity(), total = 0.f, first = 0.f, second = 0.f;
#pragma unroll
      for (int t = 0; t < teams; ++t) maxima[t] = shared.maximum[row][t];
#pragma unroll
      for (int t = 0; t < teams; ++t) maximum = fmaxf(maximum, maxima[t]);
      float origin = maximum == ptx::negative_infinity() ? 0.f : maximum;
#pragma unroll
      for (int t = 0; t < teams; ++t) {
        float weight = ptx::exp2_approx(maxima[t] - origin);
        float2 pair = kept[t * Shared::exchange_rows * Shared::exchange_columns / 2];
        total += weight * shared.sum[row][t];
        first += weight * pair.x;
        second += weight * pair.y;
      }
      float inverse = total == 0.f ? 0.f : value_scale * ptx::reciprocal_approx(total);
      float2 result = make_float2(first * inverse, second * inverse);
      if (keep) {
        *kept = result;
        if (at == 0) shared.own_lse[from] = row_lse(maximum, total);
        continue;
      }
      Target target = early_target && half == 0 && i == thread ? first_target : target_of(item, unit, row, at);
      if (item.partial_row >= 0) {
        *static_cast<float2*>(target.columns) = result;
      } else {
        *static_cast<u32*>(target.columns) = ptx::pack2<typename Traits::Out>(result.x, result.y);
      }
      if (target.lse) *target.lse = row_lse(maximum, total);
    }
  }
};

}  // namespace flashpage
