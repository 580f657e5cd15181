// The scoring warpgroup of latent_wide_sm90: scores, maxima, probabilities and their sums.
#pragma once
#include "flashpage/kernels/latent_wide_sm90/shared.h"
#include "flashpage/kernels/wide_scores.h"
#include "flashpage/ptx/cluster.h"
#include "flashpage/ptx/fence.h"
#include "flashpage/ptx/ldmatrix.h"
#include "flashpage/ptx/st_async.h"
#include "flashpage/ptx/wgmma.h"
#include "flashpage/tile/merge/epilogue.h"
#include "flashpage/tile/softmax/sinks.h"
#include "flashpage/tile/trace.h"

namespace flashpage {

template <class Traits>
struct WideScores {
  using Shared = WideShared<Traits>;
  using Tile = typename Shared::Tile;
  static constexpr int tokens = Shared::tokens, steps = tokens / 16;
  static constexpr int first_thread = 32 * WideRoles::first_scoring;
  using Scores = float[1][tokens / 8][4];
  using Softmax = SoftmaxState<1>;
  static constexpr bool is_pair = Shared::is_pair;
  // Panels of Q that a pair's scoring warps hold in registers: those of the tail, and of the first kept quarter. Shared
  // memory is what limits a pair: products read both factors there, and boxes arrive there.
  static constexpr int held_tail = is_pair ? Shared::tail_panels : 0;
  static constexpr int held_panels = is_pair ? held_tail + Shared::quarter_panels : 0, none_held = -1;

  u32 held[max_of(held_panels * 4, 1)][4];
  Shared& shared;
  const AttentionParams& params;
  int thread = threadIdx.x % 128;  // of the warpgroup
  int warp = thread / 32, lane = threadIdx.x % 32;

  FP_DEVICE WideScores(Shared& shared, const AttentionParams& params) : shared(shared), params(params) {}

  FP_DEVICE void run() {
    if (threadIdx.x == first_thread) stamp<Traits>(params, Stamp::start);
    for_each_unit(shared, [&](const WidePlace& place, u32 unit_use) {
      shared.query_ring.wait_full(unit_use);
      ptx::fence_before_products();  // Q was copied by cp.async
      if constexpr (is_pair) hold_query();
      Softmax softmax;
      softmax.clear();
      if (params.sinks) begin_with_sinks(softmax, rows_of(place));
      if (place.blocks > 0) {
        score_blocks(place, softmax);
      } else {
        release_query(place);
      }
      finish(place, softmax);
    });
    if (threadIdx.x == first_thread) {
      stamp<Traits>(params, Stamp::end);
      stamp<Traits>(params, Stamp::sm);
    }
  }

 private:
  // The loop has its exit in the middle, because otherwise the compiler waits for the scores that are in flight at its
  // end.
  FP_DEVICE void score_blocks(const WidePlace& place, Softmax& softmax) {
    Scores scores;
    u32 use = place.use(0);
    bool is_late = false;
    issue_products(scores, use);
#pragma unroll 1
    for (int block = 0;; ++use) {
      ptx::wgmma_wait<1>();
      if (!is_late) let_values_begin(use);
      release_first_columns(use);
      ptx::wgmma_wait<0>();
      ptx::wgmma_settle(scores[0]);
      if (block == 0 && threadIdx.x == first_thread) stamp_first<Traits>(params, Stamp::first_tile);
      release_last_columns(use);
      const bool is_last = block + 1 == place.blocks;
      if (is_last) release_query(place);
      prepare_scores<Traits>(scores, place, rows_of(place), place.first_token + block * tokens);
      if constexpr (Shared::is_selected) hide_missing(scores, use);
      hand_over(softmax, scores, place.scale, Shared::message(place, block));
      if (is_last) return;
      ++block;
      // A pair's products of values would take the tensor cores from the scores, for which the other CTA waits, too.
      is_late = !is_pair && !has_arrived(use + 1);
      if (is_late) let_values_begin(use + 1);
      issue_products(scores, use + 1);
    }
  }
  // Hides the places of a list that have no token.
  FP_DEVICE void hide_missing(Scores& scores, u32 use) const {
    const uint4 groups = *reinterpret_cast<const uint4*>(shared.present[Shared::slot(use)]);
    constexpr u32 all = 0x0f0f0f0f;
    if ((groups.x & groups.y & groups.z & groups.w) == all) return;
    const u32 words[4] = {groups.x, groups.y, groups.z, groups.w};
#pragma unroll
    for (int n = 0; n < tokens / 8; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if ((words[n / 2] >> (n % 2 * 16 + lane % 4 / 2 * 8 + lane % 2 * 2 + e) & 1) == 0)
          scores[0][n][e] = scores[0][n][e + 2] = ptx::negative_infinity();
  }
  // Lets the products of values begin that come after this block's scores: when these are almost complete, or at once
  // if the block is still being loaded, because otherwise no memory would be free for the block after it.
  FP_DEVICE void let_values_begin(u32 use) const {
    ptx::mbarrier_arrive(ptx::shared_address(&shared.scored[Shared::slot(use)][warp]));
  }
  // Whether the block's value columns have arrived.
  FP_DEVICE bool has_arrived(u32 use) const {
    bool is_missing = false;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const WideQuarter first = shared.template quarter_of<WidePart::first>(i, use);
      const WideQuarter second = shared.template quarter_of<WidePart::second>(i, use);
      is_missing = is_missing || !ptx::mbarrier_test(ptx::shared_address(first.full), first.phase) ||
                   !ptx::mbarrier_test(ptx::shared_address(second.full), second.phase);
    }
    return !__any_sync(0xffffffff, is_missing);
  }
  // Columns that are needed for scores alone are released when their products are complete: in a pair the tail and the
  // first passing quarter before the second one. A CTA without a partner has the tail alone.
  FP_DEVICE void release_first_columns(u32 use) const {
    if constexpr (is_pair) {
      if (Shared::tail_panels > 0) Shared::release(shared.tail_empty[Shared::tail_slot(use)], lane);
      Shared::release(shared.passing_empty[0], lane);
    }
  }
  FP_DEVICE void release_last_columns(u32 use) const {
    if constexpr (is_pair) {
      Shared::release(shared.passing_empty[1], lane);
    } else if (Shared::tail_panels > 0) {
      Shared::release(shared.tail_empty[Shared::tail_slot(use)], lane);
    }
  }
  FP_DEVICE void release_query(const WidePlace& place) const {
    if (lane == 0) shared.query_ring.release(place.units_before);
  }

  FP_DEVICE void hold_query() {
    if constexpr (held_tail > 0) hold_panels<held_tail>(Shared::value_panels, 0);
    hold_panels<Shared::quarter_panels>(shared.kept_quarter(0, 0).first_panel, held_tail);
  }
  template <int panels>
  FP_DEVICE void hold_panels(int first_panel, int at) {
#pragma unroll
    for (int step = 0; step < panels * 4; ++step) {
      const u8* panel = shared.query + (first_panel + step / 4) * Tile::panel_bytes;
      ptx::ldmatrix_x4(held[at * 4 + step], ptx::shared_address(panel + Tile::chunk_offset(warp * 16 + lane % 16,
                                                                                           step % 4 * 2 + lane / 16)));
    }
  }

  // Issues scores = Q K^T in two groups: values' products may begin when the first one is complete. Columns come in the
  // order in which their memory is free.
  FP_DEVICE void issue_products(Scores& scores, u32 use) const {
    if constexpr (is_pair) {
      issue_quarter<held_tail>(scores, shared.kept_quarter(0, use), false);
      issue_quarter(scores, shared.kept_quarter(1, use), true);
      issue_tail<0>(scores, use, true);
      issue_quarter(scores, shared.passing_quarter(0, use), true);
      ptx::wgmma_commit();
      issue_quarter(scores, shared.passing_quarter(1, use), true);
    } else {
      issue_tail<none_held>(scores, use, false);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i == 3) ptx::wgmma_commit();
        issue_quarter(scores, shared.kept_quarter(i, use), Shared::tail_panels > 0 || i > 0);
      }
    }
    ptx::wgmma_commit();
  }
  template <int held_at>
  FP_DEVICE void issue_tail(Scores& scores, u32 use, bool accumulate) const {
    const u32 slot = Shared::tail_slot(use);
    if constexpr (Shared::tail_panels > 0)
      issue_panels<Shared::tail_panels, held_at>(scores, Shared::value_panels, shared.tails[slot],
                                                 shared.tail_full[slot], Shared::tail_phase(use), accumulate);
  }
  template <int held_at = none_held>
  FP_DEVICE void issue_quarter(Scores& scores, const WideQuarter& at, bool accumulate) const {
    issue_panels<Shared::quarter_panels, held_at>(scores, at.first_panel, at.memory, *at.full, at.phase, accumulate);
  }
  // `held_at`: where Q's panels are among those that are held.
  template <int panels, int held_at>
  FP_DEVICE void issue_panels(Scores& scores, int first_panel, const u8* keys, const u64& full, u32 phase,
                              bool accumulate) const {
    const ptx::Matrix query(ptx::shared_address(shared.query) + first_panel * Tile::panel_bytes, 0);
    const ptx::Matrix block(ptx::shared_address(keys), 0);
    ptx::mbarrier_wait(ptx::shared_address(&full), phase);
    if constexpr (Shared::products_need_fence) ptx::fence_before_products();
    ptx::wgmma_fence();  // after a wait the compiler would insert one, and serialise products
#pragma unroll
    for (int step = 0; step < panels * 4; ++step) {
      const int offset = step / 4 * Tile::panel_bytes + step % 4 * 32;
      if constexpr (held_at != none_held) {
        Traits::HeldKeyProduct::multiply(scores[0], held[held_at * 4 + step], block.at(offset), accumulate || step > 0);
      } else {
        Traits::KeyProduct::multiply(scores[0], query.at(offset), block.at(offset), accumulate || step > 0);
      }
    }
  }

  // Maxima always move: values are multiplied while the next block's products of scores run.
  FP_DEVICE void hand_over(Softmax& softmax, Scores& scores, float scale_of_unit, u32 message) const {
    const float scale = softmax_scale_of<Traits>(scale_of_unit, {});
    float factor[1][2];
    if (!softmax.raise(scores, scale, factor, 0.f)) factor[0][0] = factor[0][1] = 1.f;
    softmax.exponentiate(scores, scale);
    u32 probabilities[steps][4];
    pack_probabilities<typename Traits::Cache>(scores, probabilities);
    wait_until_taken(message);
#pragma unroll
    for (int step = 0; step < steps; ++step) {
      const u32(&words)[4] = probabilities[step];
      shared.probabilities[0][step][thread] = make_uint4(words[0], words[1], words[2], words[3]);
      if constexpr (is_pair) {
        const float4 same = make_float4(__uint_as_float(words[0]), __uint_as_float(words[1]), __uint_as_float(words[2]),
                                        __uint_as_float(words[3]));
        ptx::store_async(at_peer(&shared.probabilities[1][step][thread]), same, at_peer(&shared.received[warp]));
      }
    }
    pass(make_float2(factor[0][0], factor[0][1]));
  }
  FP_DEVICE void wait_until_taken(u32 message) const {
    ptx::mbarrier_wait_for_peers(ptx::shared_address(&shared.taken[warp]), (message & 1) ^ 1);
  }
  // Passes the factors, or sums, of a lane's two rows to both CTAs. This ends a message.
  FP_DEVICE void pass(const float2& of_rows) const {
    const int place = warp * 8 + lane / 4;
    if (lane % 4 == 0) {
      shared.factors[0][place] = of_rows;
      if constexpr (is_pair)
        ptx::store_async(at_peer(&shared.factors[1][place]), of_rows, at_peer(&shared.received[warp]));
    }
    ptx::mbarrier_arrive(ptx::shared_address(&shared.handed_over[warp]));
  }
  FP_DEVICE static u32 at_peer(const auto* here) {
    return ptx::peer_address(ptx::shared_address(here), ptx::cluster_rank() ^ 1);
  }

  // Passes the rows' sums on, and writes the LSE.
  FP_DEVICE void finish(const WidePlace& place, const Softmax& softmax) const {
    const float totals[2] = {quad_sum(softmax.sum[0][0]), quad_sum(softmax.sum[0][1])};
    const Unit& unit = place.place.unit;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = Shared::first_row() + warp * 16 + lane / 4 + half * 8;
      if (lane % 4 != 0 || row >= unit.num_rows) continue;
      if (float* lse = lse_target(params, place.place.item, unit, row))
        *lse = row_lse(softmax.maximum[0][half], totals[half]);
    }
    wait_until_taken(Shared::message(place, place.blocks));
    pass(make_float2(totals[0], totals[1]));
  }

  FP_DEVICE WarpRows rows_of(const WidePlace& place) const {
    return {params, place.place.item, place.place.unit, Shared::first_row() + warp * 16, lane};
  }
};

}  // namespace flashpage
