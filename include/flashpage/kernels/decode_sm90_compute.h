// The computing warps of decode_sm90.
#pragma once
#include "flashpage/kernels/decode_sm90_shared.h"
#include "flashpage/ptx/fence.h"
#include "flashpage/ptx/griddepcontrol.h"
#include "flashpage/ptx/named_barrier.h"
#include "flashpage/tile/arrival_merge.h"
#include "flashpage/tile/epilogue.h"
#include "flashpage/tile/mask.h"
#include "flashpage/tile/query.h"
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
  static constexpr bool query_in_registers = S::key_steps * S::row_tiles <= 8;
  static constexpr int all_barrier = 1;  // name

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

  FP_DEVICE void run() {
    if (thread == 0) stamp<Traits>(params, Stamp::start);
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
  FP_DEVICE void attend(const SlottedPlace& slotted, const u8* query_tile) {
    const WorkItem& item = slotted.place.item;
    const Unit unit = slotted.place.unit;
    const int slots = slotted.slots;
    // One field a lane: it is needed at the unit's end, and must not be waited for there.
    const bool is_piece = item.partial_row >= 0;
    const i32 merge_field = is_piece ? __ldg(reinterpret_cast<const i32*>(slotted.merge) + lane % 8) : 0;
    float values[S::row_tiles][S::value_tiles][4] = {};
    SoftmaxState<S::row_tiles> state;
    start(state, item, unit);
    float scale = score_scale_of<Traits>(params, unit);
    u32 query = query_lane_address<Traits>(ptx::shared_address(query_tile) + first_row * S::QueryRows::stride, lane);
    u32 query_registers[query_in_registers ? S::key_steps : 1][S::row_tiles][4];
    if constexpr (query_in_registers) {
#pragma unroll
      for (int i = 0; i < S::key_steps; ++i) load_query_fragment<Traits>(query_registers[i], query, i);
    }
    auto query_fragment = [&](u32(&a)[S::row_tiles][4], int step) {
      if constexpr (query_in_registers) {
#pragma unroll
        for (int m = 0; m < S::row_tiles; ++m)
#pragma unroll
          for (int i = 0; i < 4; ++i) a[m][i] = query_registers[step][m][i];
      } else {
        load_query_fragment<Traits>(a, ptx::opaque(query), step);
      }
    };

    for (int slot = (team - turn) % teams; slot < slots; slot += teams) {
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
      multiply_keys<Traits>(scores, keys, lane, query_fragment, nothing);
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
    combine(state, values[0], item, unit);
    if (thread == 0) stamp<Traits>(params, Stamp::written);
    if (is_piece) merge_if_last(merge_field, slotted.arrivals);
  }

  // A box may bring tokens that the unit does not see, and leaves what was there before where it brings none: NaN maybe,
  // which a probability of zero would not hide.
  FP_DEVICE void clear_values(u8* tile, const Unit& unit, i32 first) {
    constexpr int chunks = Shared::value_bytes / tokens / 16;
    for (int i = lane; i < tokens * chunks; i += 32) {
      int row = i / chunks, chunk = i % chunks;
      if (first + row >= unit.kv_begin && first + row < unit.kv_end) continue;
      *reinterpret_cast<uint4*>(tile + chunk / 8 * (tokens * 128) + row * 128 + chunk % 8 * 16) = make_uint4(0, 0, 0, 0);
    }
    ptx::fence_before_bulk_copies();
    __syncwarp();
  }

  FP_DEVICE void start(SoftmaxState<S::row_tiles>& state, const WorkItem& item, const Unit& unit) {
    state.clear();
    if (team != 0 || !params.sinks) return;
#pragma unroll
    for (int m = 0; m < S::row_tiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        i32 row = min_of(first_row + m * 16 + half * 8 + lane / 4, unit.num_rows - 1);
        state.maximum[m][half] = sink_of_row(params, item, unit, unit.first_row + row);
        state.sum[m][half] = lane % 4 == 0 && state.maximum[m][half] != ptx::negative_infinity() ? 1.f : 0.f;
      }
  }

  // The teams' states into one, and out.
  FP_DEVICE void combine(SoftmaxState<S::row_tiles>& state, float (&values)[S::value_tiles][4], const WorkItem& item,
                         const Unit& unit) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int row = first_row + half * 8 + lane / 4;
      float sum = quad_sum(state.sum[0][half]);
      if (lane % 4 == 0 && part == 0) {
        shared.maximum[team][row] = state.maximum[0][half];
        shared.sum[team][row] = sum;
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (half * 8 >= unit.num_rows) break;
      if (first_row + half * 8 + lane / 4 < unit.num_rows) {
        float* mine = shared.exchange[team][first_row / 2 + lane / 4];
        for_each_column_pair<Traits>(values, half, lane, [&](int at, float first, float second) {
          *reinterpret_cast<float2*>(mine + exchange_column(lane / 4, part * S::value_columns + at)) =
              make_float2(first, second);
        });
      }
      ptx::named_barrier(all_barrier, threads);
      write_rows(item, unit, half);
      ptx::named_barrier(all_barrier, threads);
    }
  }

  // Rotated, so that rows of two neighbouring columns meet all banks.
  FP_DEVICE static int exchange_column(int row, int column) { return column ^ (row & 3) * 8; }

  FP_DEVICE void write_rows(const WorkItem& item, const Unit& unit, int half) {
    constexpr int pairs = Traits::head_dim_vo / 2;
    const int rows = min_of(Shared::exchange_rows, unit.num_rows);
    float value_scale = value_scale_of(params, unit.kv_head);
    for (int i = thread; i < rows * pairs; i += threads) {
      int from = i / pairs, at = i % pairs * 2, row = from / 8 * 16 + half * 8 + from % 8;
      if (row >= unit.num_rows) continue;
      float maximum = shared.maximum[0][row];
#pragma unroll
      for (int t = 1; t < teams; ++t) maximum = fmaxf(maximum, shared.maximum[t][row]);
      float origin = maximum == ptx::negative_infinity() ? 0.f : maximum;
      float total = 0.f, first = 0.f, second = 0.f;
#pragma unroll
      for (int t = 0; t < teams; ++t) {
        float weight = ptx::exp2_approx(shared.maximum[t][row] - origin);
        float2 pair = *reinterpret_cast<const float2*>(&shared.exchange[t][from][exchange_column(from, at)]);
        total += weight * shared.sum[t][row];
        first += weight * pair.x;
        second += weight * pair.y;
      }
      float inverse = total == 0.f ? 0.f : value_scale / total;
      i64 offset = out_offset<Traits>(params, item, unit, row) + at;
      store_pair<Traits>(params, item.partial_row >= 0, offset, first * inverse, second * inverse);
      if (at == 0) {
        if (float* lse = lse_target(params, item, unit, row)) *lse = row_lse(maximum, total);
      }
    }
  }

  // Every thread's partial rows are written: the CTA that finds all other pieces there combines them.
  FP_DEVICE void merge_if_last(i32 field, u32* arrivals) {
    MergeItem merge;
    i32* fields = reinterpret_cast<i32*>(&merge);
#pragma unroll
    for (int i = 0; i < 8; ++i) fields[i] = __shfl_sync(0xffffffff, field, i);
    if (thread == 0) shared.is_last_piece = is_last_arrival(arrivals, merge.num_partials);
    ptx::named_barrier(all_barrier, threads);
    if (shared.is_last_piece) ArrivalMerge<Traits, Warps::computing>::run(params, merge, shared.merge_sums, warp, lane);
  }
};

}  // namespace flashpage
