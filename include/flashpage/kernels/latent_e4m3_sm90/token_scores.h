// The scoring warpgroup of latent_e4m3_sm90 for up to 32 packed rows. Scores are transposed: tokens are the rows of
// their products, and both terms of Q their columns, so that a block is read once, and few packed rows cost few
// products. A warp has 16 tokens, a lane two of them, and all warps have all packed rows.
#pragma once
#include "flashpage/kernels/latent_e4m3_sm90/query.h"
#include "flashpage/ptx/compiler.h"
#include "flashpage/ptx/fence.h"
#include "flashpage/ptx/named_barrier.h"
#include "flashpage/ptx/wgmma.h"
#include "flashpage/tile/merge/epilogue.h"
#include "flashpage/tile/softmax/column_state.h"
#include "flashpage/tile/softmax/softmax.h"
#include "flashpage/tile/trace.h"

namespace flashpage {

template <class Traits>
struct E4m3TokenScores {
  using Shared = E4m3Shared<Traits>;
  using Tile = typename Shared::Tile;
  using Weights = typename Shared::Weights;
  static constexpr int tokens = Shared::tokens, rows = Shared::rows, tiles = rows / 8, groups = Shared::groups;
  static constexpr int first_thread = 32 * WideRoles::first_scoring, threads = 32 * WideRoles::group, barrier = 1;
  using Scores = float[tiles][4];
  using Products = float[2 * tiles][4];  // of the first terms, and then of the second ones
  using State = ColumnState<tiles>;
  // Groups of columns whose products are computed at the same time, in at most 64 registers.
  static constexpr int together = min_of(groups, 64 / (8 * tiles));
  static_assert(groups % together == 0);

  Shared& shared;
  const AttentionParams& params;
  int warp = static_cast<int>(threadIdx.x % 128 / 32), lane = threadIdx.x % 32;

  FP_DEVICE E4m3TokenScores(Shared& shared, const AttentionParams& params) : shared(shared), params(params) {}

  FP_DEVICE void run() {
    if (threadIdx.x == first_thread) stamp<Traits>(params, Stamp::start);
    for_each_unit(shared, [&](const WidePlace& place) {
      shared.query_ring.wait_full(place.units_before);
      if (warp * 16 < rows) {
        const u32 query = ptx::shared_address(shared.query);
        const float of_row = E4m3Query<Traits>::convert(query, warp * 16, lane, place.scale);
        if (lane < 16) shared.row_scales[warp * 16 + lane] = of_row;
        ptx::fence_before_products();
      }
      meet_at(shared.converted, place.units_before);
      State state;
      state.clear();
      if (params.sinks && place.place.item.piece == 0)
        state.begin_with_sinks(params, place.place.unit, warp, lane, Shared::least_exponent);
      state.ignore_absent_rows(place.place.unit.num_rows, lane);
      score_blocks(place, state);
      shared.query_ring.release(place.units_before);
      finish(place, state);
    });
    if (threadIdx.x == first_thread) {
      stamp<Traits>(params, Stamp::end);
      stamp<Traits>(params, Stamp::sm);
    }
  }

 private:
  FP_DEVICE int row_of(int n, int e) const { return n * 8 + lane % 4 * 2 + e % 2; }
  FP_DEVICE int token_of(int half) const { return warp * 16 + half * 8 + lane / 4; }  // of a block

  FP_DEVICE void score_blocks(const WidePlace& place, State& state) const {
    float scales[tiles][2];
#pragma unroll
    for (int n = 0; n < tiles; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) scales[n][e] = shared.row_scales[row_of(n, e)];
    const Unit& unit = place.place.unit;
    const i32 whole_begin = unit.all_begin, whole_end = unit.all_end - tokens;
    u32 use = place.use(0);
    i32 first = place.first_token;
#pragma unroll 1
    for (i32 left = place.blocks; left > 0; --left, ++use, first += tokens) {
      const auto& of_tokens = shared.of_tokens[shared.block_ring.slot(use)];
      Scores scores;
      multiply_keys(scores, use);
      if (left == place.blocks && threadIdx.x == first_thread) stamp_first<Traits>(params, Stamp::first_tile);
      const float exponent = of_tokens.exponents[warp], inverse = of_tokens.inverses[warp];
      const u32 present = of_tokens.present[warp / 2];
      shared.block_ring.release(use);
#pragma unroll
      for (int n = 0; n < tiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const bool exists = (present >> token_of(e / 2) % 32 & 1) != 0;
          scores[n][e] = exists ? fmaf(scores[n][e], scales[n][e % 2], exponent) : ptx::negative_infinity();
        }
      if (first < whole_begin || first > whole_end)
        mask_columns(scores, params, place.place.item, unit, first + warp * 16, lane);
      float factor[tiles][2];
      const bool moved = state.raise(scores, shared.tops, warp, lane, factor, vote, Shared::above, Shared::headroom);
      state.exponentiate(scores, inverse);  // sums have no power of two of their steps
      hand_over(scores, factor, moved, use + place.units_before);
    }
  }

  // Scores of a block's tokens. A lane has two tokens, so it needs few scales.
  FP_DEVICE void multiply_keys(Scores& scores, u32 use) const {
    const u32 slot = shared.block_ring.slot(use);
    const ptx::Matrix keys(ptx::shared_address(shared.blocks[slot]), 0);
    const ptx::Matrix terms(ptx::shared_address(shared.query), 0);
    Products products[together];
    shared.block_ring.wait_full(use);
    ptx::wgmma_fence();
    if constexpr (Shared::tail_panels > 0) {
      const ptx::Matrix tail(ptx::shared_address(shared.tails[slot]), 0);
#pragma unroll
      for (int step = 0; step < 4; ++step)
        Traits::TailProduct::multiply(scores, tail.at((Shared::has_e4m3_tail ? step % 2 : step) * 32),
                                      terms.at(2 * Shared::panels * Tile::panel_bytes + step * 32), step > 0);
    }
    const auto& of_tokens = shared.of_tokens[slot];
#pragma unroll
    for (int first = 0; first < groups; first += together) {
      if (first > 0) ptx::wgmma_fence();
#pragma unroll
      for (int i = 0; i < together; ++i)
#pragma unroll
        for (int step = 0; step < 4; ++step)
          Traits::KeyProduct::multiply(products[i], keys.at((first + i) * Shared::panel_bytes + step * 32),
                                       terms.at(2 * (first + i) * Tile::panel_bytes + step * 32), step > 0);
      ptx::wgmma_commit();
      float of_group[together][2];
#pragma unroll
      for (int i = 0; i < together; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          of_group[i][half] = of_tokens.scales[first + i][TokenOrder::index_of(token_of(half))];
      const float of_tail = first == 0 && Shared::has_e4m3_tail ? of_tokens.of_tail : 1.f;
      ptx::wgmma_wait<0>();
      if (first == 0) ptx::wgmma_settle(scores);
#pragma unroll
      for (auto& of : products) ptx::wgmma_settle(of);
#pragma unroll
      for (int n = 0; n < tiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& score = scores[n][e];
          if (first == 0 && Shared::tail_panels == 0) score = 0.f;
          if (first == 0 && Shared::has_e4m3_tail) score *= of_tail;
#pragma unroll
          for (int i = 0; i < together; ++i)
            score = fmaf(products[i][n][e] + products[i][n + tiles][e], of_group[i][e / 2], score);
        }
    }
  }

  FP_DEVICE static bool vote(bool any) { return ptx::named_barrier_or(barrier, threads, any); }

  FP_DEVICE void hand_over(const Scores& scores, const float (&factor)[tiles][2], bool moved, u32 message) const {
    shared.message_ring.wait_empty(message);
    const u32 slot = shared.message_ring.slot(message);
    const u32 to = ptx::shared_address(shared.weights[slot]);
#pragma unroll
    for (int n = 0; n < tiles; n += 2) store_columns<Half, Weights>(to, scores, n, warp, lane);
    ptx::fence_before_products();
    if (warp == 0 && lane < 4) shared.moved[slot][lane] = moved;  // all rows at a time; there is a byte for 16
    if (moved) write_factors(slot, factor);
    ptx::mbarrier_arrive(shared.message_ring.full_barrier(message));
  }
  // All warps have the same.
  FP_DEVICE void write_factors(u32 slot, const float (&factor)[tiles][2]) const {
    if (warp != 0 || lane >= 4) return;
#pragma unroll
    for (int n = 0; n < tiles; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) shared.factors[slot][row_of(n, e)] = factor[n][e];
  }

  // Passes the rows' sums on, and writes the LSE.
  FP_DEVICE void finish(const WidePlace& place, const State& state) const {
    const Unit& unit = place.place.unit;
    float totals[tiles][2];
#pragma unroll
    for (int n = 0; n < tiles; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float sum = column_sum(state.sum[n][e]);
        if (lane < 4) shared.sums[warp][row_of(n, e)] = sum;
      }
    ptx::named_barrier(barrier, threads);
#pragma unroll
    for (int n = 0; n < tiles; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int row = row_of(n, e);
        totals[n][e] = 0.f;
#pragma unroll
        for (int w = 0; w < WideRoles::group; ++w) totals[n][e] += shared.sums[w][row];
        if (warp != 0 || lane >= 4 || row >= unit.num_rows) continue;
        if (float* lse = lse_target(params, place.place.item, unit, row))
          *lse = row_lse(state.maximum[n][e], totals[n][e]);
      }
    const u32 message = Shared::message(place, place.blocks);
    shared.message_ring.wait_empty(message);
    write_factors(shared.message_ring.slot(message), totals);
    ptx::named_barrier(barrier, threads);  // the sums have been read
    ptx::mbarrier_arrive(shared.message_ring.full_barrier(message));
  }
};

}  // namespace flashpage
