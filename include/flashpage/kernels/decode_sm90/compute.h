// The computing warps of decode_sm90: they multiply the slots that the loading warps fill.
#pragma once
#include "flashpage/kernels/decode_sm90/combine.h"
#include "flashpage/kernels/decode_sm90/swapped_unit.h"
#include "flashpage/ptx/fence.h"
#include "flashpage/ptx/named_barrier.h"
#include "flashpage/tile/load/half_query.h"
#include "flashpage/tile/mask/mask.h"
#include "flashpage/tile/product/four_bits.h"
#include "flashpage/tile/product/query_fragments.h"
#include "flashpage/tile/product/values.h"
#include "flashpage/tile/rope/rotated_keys.h"
#include "flashpage/tile/softmax/sinks.h"
#include "flashpage/tile/softmax/softmax.h"
#include "flashpage/tile/softmax/token_scales.h"
#include "flashpage/tile/trace.h"

namespace flashpage {

template <class Traits>
struct DecodeCompute {
  using S = Shape<Traits>;
  using Warps = DecodeWarps<Traits>;
  using Shared = DecodeShared<Traits>;
  using KeyFormat = typename S::Formats::Key;
  using ValueFormat = typename S::Formats::Value;
  static_assert(!has_group_scales<KeyFormat> || S::Formats::key_bits == 4, "scales of 16 columns are of 4 bits");
  static_assert(!has_group_scales<ValueFormat> || S::Formats::value_bits == 4, "scales of 16 columns are of 4 bits");
  static_assert(!KeyFormat::has_zero || S::Formats::key_bits == 4, "zero points are of 4 bits");
  static_assert(!ValueFormat::has_zero || S::Formats::value_bits == 4, "zero points are of 4 bits");
  static constexpr int tokens = Shared::tokens;
  static constexpr int threads = S::threads;
  static constexpr int teams = Warps::teams;
  static constexpr int all_barrier = DecodeCombine<Traits>::barrier;  // its name

  Shared& shared;
  const AttentionParams& params;
  const VariantArgs& args;
  int thread = threadIdx.x - Warps::loading * 32;
  int lane = threadIdx.x % 32;
  int warp = thread / 32;
  int team = warp / Warps::team;
  int first_row = warp % Warps::team / Traits::warps_v * S::rows_a_warp;
  int part = warp % Traits::warps_v;  // part of the value columns
  u32 use = 0;                        // uses of the ring before this unit
  u32 clearings = 0;                  // of this team so far

  FP_DEVICE DecodeCompute(Shared& shared, const AttentionParams& params, const VariantArgs& args)
      : shared(shared), params(params), args(args) {}

  // Fills the table of rotated keys; reads no global memory.
  FP_DEVICE void make_rotations() {
    shared.rotations.fill_frequencies(params, thread, threads);
    ptx::named_barrier(all_barrier, threads);
    shared.rotations.fill_rotations(thread, threads);
    ptx::named_barrier(all_barrier, threads);
  }

  FP_DEVICE void run() {
    if (thread == 0) stamp<Traits>(params, Stamp::start);
    if constexpr (Shared::has_mailbox) ptx::cluster_wait();  // before anything is sent; all CTAs arrived long ago
    for (u32 unit_use = 0;; ++unit_use) {
      shared.place_ring.wait_full(unit_use);
      const SlottedPlace& place = shared.places[shared.place_ring.slot(unit_use)];
      if (place.place.done) break;
      attend(place, shared.query[shared.place_ring.slot(unit_use)]);
      use += place.slots;
      shared.place_ring.release(unit_use);  // by each lane: racecheck orders only its own reads before an arrival
    }
    if (thread == 0) {
      stamp<Traits>(params, Stamp::end);
      stamp<Traits>(params, Stamp::sm);
    }
  }

 private:
  struct Nothing {};

  FP_DEVICE void attend(const SlottedPlace& slotted, u8* query_tile) {
    const Unit unit = slotted.place.unit;
    const int slots = slotted.slots;
    // The team's rank in this unit. States are summed in this order, so that it does not depend on earlier units.
    const int rank = teams == 8 ? (team - use) % teams : (team + teams - use % teams) % teams;
    DecodeCombine<Traits> combine(shared, params, slotted, unit, rank, first_row, part, thread);
    if constexpr (S::swaps) {
      SwappedUnit<Traits> swapped(shared, params, slotted, rank, lane);
      swapped.run(query_tile, use, [&](u8* tile, i32 first) { clear_values(tile, unit, first); });
      if (thread == 0) stamp<Traits>(params, Stamp::last_tile);
      combine.run([&](int) { swapped.hand_over(); });
    } else {
      attend_rows(combine, unit, slots, rank, slotted, query_tile);
    }
  }

  FP_DEVICE void attend_rows(DecodeCombine<Traits>& combine, const Unit& unit, int slots, int rank,
                             const SlottedPlace& slotted, u8* query_tile) {
    const WorkItem& item = slotted.place.item;
    float values[S::row_tiles][S::value_tiles][4] = {};
    SoftmaxState<S::row_tiles> state;
    state.clear();
    ScaledProbabilities value_scale;
    const WarpRows rows{params, item, unit, first_row, lane};
    if (rank == 0 && params.sinks) begin_with_sinks(state, rows);
    float scale = score_scale_of<Traits>(params, item, unit);
    if constexpr (S::key_bits == 4) scale *= S::Formats::Key::half_left_out;
    if constexpr (S::rotate) {
      rotate_query_by_table<Traits>(query_tile, shared.rotations, params, item, unit, thread);
      ptx::named_barrier(all_barrier, threads);
      scale /= Shared::Rotations::key_scale;
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
      const auto origin = rotation_at(slotted.first_token + slot * tokens);
      shared.ring.wait_full(use + slot);
      if (thread == 0) stamp_first<Traits>(params, Stamp::first_tile);
      const u32 at = shared.ring.slot(use + slot);
      u8* tile = shared.slots[at];
      u32 keys = ptx::shared_address(tile);
      i32 first = slotted.first_token + slot * tokens;
      if constexpr (Traits::loader == Loader::boxes) {
        if (first < unit.kv_begin || first + tokens > unit.kv_end) clear_values(tile + Shared::key_bytes, unit, first);
      }
      float scores[S::row_tiles][tokens / 8][4];
      auto nothing = [](int) {};
      if constexpr (S::rotate) {
        multiply_rotated_keys<Traits>(scores, keys, lane, query_fragment, shared.rotations, origin);
      } else if constexpr (S::key_bits == 4) {
        multiply_four_bit_keys<Traits>(scores, keys, shared.scales.keys(at), lane, query_fragment);
      } else {
        multiply_keys<Traits>(scores, keys, lane, query_fragment, nothing);
      }
      if constexpr (has_token_scales<KeyFormat>) scale_scores<KeyFormat>(scores, shared.scales.keys(at), lane);
      if (transforms_scores<Traits>(params, scale)) transform_scores<Traits>(scores, scale, rows, args, first);
      if (needs_mask<Traits>(unit, first, tokens)) mask_scores<Traits>(scores, rows, args, first);
      state.update(scores, values, softmax_scale_of<Traits>(scale, args));
      if constexpr (has_token_scales<ValueFormat>)
        value_scale.template scale<ValueFormat>(scores, values, shared.scales.values(at), lane);
      Probabilities<Traits, tokens / 8> probabilities(scores);
      const u32 value_tile = keys + Shared::key_bytes + part * S::ValueRows::tile_bytes;
      if constexpr (S::Formats::value_bits == 4) {
        multiply_four_bit_values<Traits>(values, probabilities.fragment, value_tile, shared.scales.values(at), lane);
      } else {
        multiply_values(values, probabilities, value_tile, lane, nothing);
      }
      __syncwarp();
      if (lane == 0) shared.ring.release(use + slot);
    }
    if (thread == 0) stamp<Traits>(params, Stamp::last_tile);
    if constexpr (S::Formats::value_bits == 4 || has_token_scales<ValueFormat>) {
      float factor = has_token_scales<ValueFormat> ? value_scale.unit : 1.f;
      if constexpr (S::Formats::value_bits == 4) factor *= ValueFormat::half_left_out;
#pragma unroll
      for (float (&tile)[4] : values[0])
#pragma unroll
        for (float& value : tile) value *= factor;
    }
    combine.run(state, values[0]);
  }

  // The rotation of a slot's first token, computed before the slot is waited for.
  FP_DEVICE auto rotation_at(i32 first) const {
    if constexpr (S::rotate) {
      return SpreadRotations<Traits>(shared.rotations, first, lane);
    } else {
      return Nothing{};
    }
  }

  // Clears tokens of a slot that the unit does not see. Boxes may bring such tokens, and parts of the slot without a
  // box keep what they had before, perhaps NaN, which a probability of zero would not hide.
  FP_DEVICE void clear_values(u8* tile, const Unit& unit, i32 first) {
    constexpr int chunks = Shared::value_bytes / tokens / 16, team_threads = 32 * Warps::team;
    for (int i = thread % team_threads; i < tokens * chunks; i += team_threads) {
      int row = i / chunks, chunk = i % chunks;
      if (first + row >= unit.kv_begin && first + row < unit.kv_end) continue;
      *reinterpret_cast<uint4*>(tile + chunk / 8 * (tokens * 128) + row * S::ValueRows::stride + chunk % 8 * 16) =
          make_uint4(0, 0, 0, 0);
    }
    ptx::fence_before_bulk_copies();
    if constexpr (Warps::team == 1) {
      __syncwarp();
    } else {  // in shared memory: racecheck loses the named barriers of a kernel with several
      const u32 barrier = ptx::shared_address(&shared.cleared[team]);
      ptx::mbarrier_arrive(barrier);
      ptx::mbarrier_wait(barrier, clearings++ & 1);
    }
  }
};

}  // namespace flashpage
