// The computing warpgroups of latent_decode_sm90: they multiply the slots that the loading warps fill.
#pragma once
#include "flashpage/kernels/latent_decode_sm90/merge.h"
#include "flashpage/kernels/latent_decode_sm90/output.h"
#include "flashpage/ptx/fence.h"
#include "flashpage/ptx/wgmma.h"
#include "flashpage/tile/softmax/column_state.h"
#include "flashpage/tile/softmax/transform.h"
#include "flashpage/tile/trace.h"

namespace flashpage {

template <class Traits>
struct LatentCompute {
  using Warps = LatentWarps<Traits>;
  using Shared = LatentShared<Traits>;
  using Slot = typename Shared::Slot;
  using QueryRows = typename Shared::QueryRows;
  using Cache = typename Traits::Cache;
  static constexpr int tokens = Shared::tokens;
  static constexpr int blocks = Shared::blocks / Warps::teams;  // of value columns, of a team
  static constexpr int tiles = Shared::rows / 8;                // of packed rows
  static constexpr int team_threads = 32 * Warps::team;
  using Scores = float[tiles][4];
  using Values = float[blocks][tiles][4];

  Shared& shared;
  const AttentionParams& params;
  int thread = threadIdx.x - Warps::loading * 32;
  int lane = threadIdx.x % 32;
  int team = thread / team_threads, warp = thread / 32 % Warps::team;
  u32 use = 0;  // uses of the ring before this unit

  FP_DEVICE LatentCompute(Shared& shared, const AttentionParams& params) : shared(shared), params(params) {}

  FP_DEVICE void run() {
    if (thread == 0) stamp<Traits>(params, Stamp::start);
    for (u32 unit_use = 0;; ++unit_use) {
      shared.place_ring.wait_full(unit_use);
      const SlottedPlace& place = shared.places[shared.place_ring.slot(unit_use)];
      if (place.place.done) break;
      ptx::fence_before_products();  // Q was copied by cp.async
      attend(place, shared.query[shared.place_ring.slot(unit_use)]);
      use += place.slots;
      const LatentMerge<Traits> merge(place);
      shared.place_ring.release(unit_use);
      merge.run(params, thread);
    }
    if (thread == 0) {
      stamp<Traits>(params, Stamp::end);
      stamp<Traits>(params, Stamp::sm);
    }
  }

 private:
  FP_DEVICE int team_barrier() const { return LatentOutput<Traits>::barrier + 1 + team; }
  FP_DEVICE void meet_all() const { ptx::named_barrier(LatentOutput<Traits>::barrier, 32 * Warps::computing); }

  FP_DEVICE void attend(const SlottedPlace& slotted, u8* query_tile) {
    const WorkItem& item = slotted.place.item;
    const Unit unit = slotted.place.unit;
    Values values = {};
    ColumnState<tiles> state;
    state.clear();
    if (params.sinks && item.piece == 0) state.begin_with_sinks(params, unit, warp, lane);
    const float scale = latent_score_scale<Traits>(params, item, unit);
    for (int slot = 0; slot < slotted.slots; ++slot) {
      const i32 first = slotted.first_token + slot * tokens;
      u8* tile = shared.slots[shared.ring.slot(use + slot)];
      shared.ring.wait_full(use + slot);
      if (thread == 0) stamp_first<Traits>(params, Stamp::first_tile);
      if constexpr (Traits::loader == Loader::rows) {
        if constexpr (!Shared::converts) ptx::fence_before_products();
      } else if (first < unit.kv_begin || first + tokens > unit.kv_end) {
        clear_hidden(tile, unit, first);
      }
      Scores scores;
      multiply_keys(scores, tile, query_tile);
      add_other_half(scores);
#pragma unroll
      for (int n = 0; n < tiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) scores[n][e] *= scale;
      if constexpr (Shared::is_selected) {
        hide_missing(scores, shared.present[shared.ring.slot(use + slot)]);
      } else if (first < unit.all_begin || first + tokens > unit.all_end) {
        mask_columns(scores, params, item, unit, first + warp * 16, lane);
      }
      float factor[tiles][2];
      const auto vote = [&](bool outgrown) { return ptx::named_barrier_or(team_barrier(), team_threads, outgrown); };
      if (state.raise(scores, shared.top[team], warp, lane, factor, vote)) rescale(values, factor);
      state.exponentiate(scores);
      store_probabilities(scores);
      ptx::fence_before_products();
      meet_all();
      multiply_values(values, tile);
      if (lane == 0) shared.ring.release(use + slot);
    }
    if (thread == 0) stamp<Traits>(params, Stamp::last_tile);
    LatentOutput<Traits>{shared, params, item, unit, thread, team}.write(state, values);
  }

  // S^T = K Q^T, for the team's half of each panel of K and Q; columns that only pad a panel are zero.
  FP_DEVICE void multiply_keys(Scores& scores, u8* tile, u8* query_tile) const {
    const ptx::Matrix keys(ptx::shared_address(tile) + team * 64, 0);
    const ptx::Matrix query(ptx::shared_address(query_tile) + team * 64, 0);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < Slot::panels * 2; ++step) {
      const int panel = step / 2, in_panel = step % 2 * 32;
      Traits::KeyProduct::multiply(scores, keys.at(panel * Slot::panel_bytes + in_panel),
                                   query.at(panel * QueryRows::panel_bytes + in_panel), step > 0);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::wgmma_settle(scores);
  }

  // The other team's scores are overwritten after the barrier that follows the probabilities.
  FP_DEVICE void add_other_half(Scores& scores) const {
#pragma unroll
    for (int n = 0; n < tiles; ++n)
      shared.exchange[team][n][thread % 128] = make_float4(scores[n][0], scores[n][1], scores[n][2], scores[n][3]);
    meet_all();
#pragma unroll
    for (int n = 0; n < tiles; ++n) {
      const float4 other = shared.exchange[1 - team][n][thread % 128];
      scores[n][0] += other.x, scores[n][1] += other.y, scores[n][2] += other.z, scores[n][3] += other.w;
    }
  }

  // O^T += V^T P^T. A block of V^T is a panel of the slot.
  FP_DEVICE void multiply_values(Values& values, u8* tile) const {
    const ptx::Matrix slot(ptx::shared_address(tile) + team * blocks * Slot::panel_bytes, 0);
    const ptx::Matrix probabilities(ptx::shared_address(shared.probabilities), 0);
    ptx::wgmma_fence();
#pragma unroll
    for (int block = 0; block < blocks; ++block)
#pragma unroll
      for (int step = 0; step < tokens / 16; ++step)
        Traits::ValueProduct::multiply(values[block], slot.at(block * Slot::panel_bytes + step * 16 * 128),
                                       probabilities.at(step * 32), true);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
#pragma unroll
    for (int block = 0; block < blocks; ++block) ptx::wgmma_settle(values[block]);
  }

  FP_DEVICE static void rescale(Values& values, const float (&factor)[tiles][2]) {
#pragma unroll
    for (int block = 0; block < blocks; ++block)
#pragma unroll
      for (int n = 0; n < tiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) values[block][n][e] *= factor[n][e % 2];
  }

  // Hides the places of a list that have no token; a row that lists its tokens sees all others.
  FP_DEVICE void hide_missing(Scores& scores, const typename Shared::Present* present) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int token = warp * 16 + h * 8 + lane / 4;
      if (present[token / Shared::noted].has(token % Shared::noted)) continue;
#pragma unroll
      for (int n = 0; n < tiles; ++n) scores[n][h * 2] = scores[n][h * 2 + 1] = ptx::negative_infinity();
    }
  }

  // Both teams have the same probabilities, and each writes half of them.
  FP_DEVICE void store_probabilities(const Scores& scores) const {
    const u32 tile = ptx::shared_address(shared.probabilities);
#pragma unroll
    for (int n = 0; n < tiles; n += 2)
      if ((n / 2 + warp) % 2 == team) store_columns<Cache, typename Shared::Probabilities>(tile, scores, n, warp, lane);
  }

  // Clears the values of tokens that the unit does not have but boxes have brought: their memory may hold NaN, and
  // 0 * NaN is NaN.
  FP_DEVICE void clear_hidden(u8* tile, const Unit& unit, i32 first) const {
    constexpr int chunks = Traits::head_dim_vo / 8;
    constexpr int threads = 32 * Warps::computing;
    for (int i = thread; i < tokens * chunks; i += threads) {
      const int row = i / chunks, chunk = i % chunks;
      if (first + row >= unit.kv_begin && first + row < unit.kv_end) continue;
      *reinterpret_cast<uint4*>(tile + Slot::chunk_offset(row, chunk)) = make_uint4(0, 0, 0, 0);
    }
    ptx::fence_before_products();
    meet_all();
  }
};

}  // namespace flashpage
