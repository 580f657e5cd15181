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

  // The operands of a block's first products, and what differs from block to block: found while the products of the
  // block before run, so that nothing is left to do between its probabilities and these products.
  struct Keys {
    ptx::Matrix kept, query_of_kept, tail;  // a pair's tail is in one place, and not found here
    bool have_arrived;                      // those of the first kept quarter; false: ask again
  };

  u32 held[max_of(held_panels * 4, 1)][4];
  Shared& shared;
  const AttentionParams& params;
  int thread = threadIdx.x % 128;  // of the warpgroup
  int warp = thread / 32, lane = threadIdx.x % 32;

  // Where this lane writes to the other CTA of a pair. Found once and opaque: the compiler would hold an address for
  // each step, and then reuse registers that asynchronous stores have not read yet, for which it waits.
  u32 peer_probabilities = 0, peer_factors = 0, peer_received = 0;

  FP_DEVICE WideScores(Shared& shared, const AttentionParams& params) : shared(shared), params(params) {
    if constexpr (is_pair) {
      peer_probabilities = ptx::opaque(at_peer(&shared.probabilities[1][0][thread]));
      peer_factors = ptx::opaque(at_peer(&shared.factors[1][thread]));
      peer_received = ptx::opaque(at_peer(&shared.received[warp]));
    }
  }

  FP_DEVICE void run() {
    if (threadIdx.x == first_thread) stamp<Traits>(params, Stamp::start);
    for_each_unit(shared, [&](const WidePlace& place) {
      shared.query_ring.wait_full(place.units_before);
      ptx::fence_before_products();  // Q may have been copied by cp.async
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
  // What each block needs of its unit, in registers: after an asm statement the compiler would read shared memory
  // again.
  struct BlockRange {
    u32 use, end;                      // blocks before this one, and before the next unit
    u32 first_unmasked, num_unmasked;  // blocks of which all rows see all tokens
    float scale;
    u32 units_before;

    FP_DEVICE u32 message() const { return use + units_before; }  // as Shared::message, of this block
  };
  FP_DEVICE BlockRange range_of(const WidePlace& place) const {
    const Unit& unit = place.place.unit;
    const u32 use = place.use(0);
    const int begin = ceil_div(max_of(unit.all_begin - place.first_token, 0), tokens);
    const int end = max_of(unit.all_end - place.first_token, 0) / tokens;
    const u32 num_unmasked = scales_first<Traits>(place.scale) ? 0 : max_of(end - begin, 0);
    const float scale = softmax_scale_of<Traits>(place.scale, {});
    return {use, use + place.blocks, use + begin, num_unmasked, scale, place.units_before};
  }
  // The loop has its exit in the middle, because otherwise the compiler waits for the scores that are in flight at its
  // end.
  FP_DEVICE void score_blocks(const WidePlace& place, Softmax& softmax) {
    Scores scores;
    BlockRange range = range_of(place);
    issue_products(scores, range.use, keys_of(range.use));
#pragma unroll 1
    for (;; ++range.use) {
      // Blocks before the first unmasked one are large numbers here. After a vote the compiler knows that no warp
      // diverges, and needs no instructions to join it.
      const bool may_hide = __any_sync(0xffffffff, range.use - range.first_unmasked >= range.num_unmasked);
      const u32 scored = ptx::opaque(ptx::shared_address(&shared.scored[Shared::scored_slot(range.use)][warp]));
      ptx::wgmma_wait<1>();
      let_values_begin(scored);
      release_first_columns(range.use);
      const Keys next = keys_of(range.use + 1);
      const bool is_taken = ptx::mbarrier_test(ptx::shared_address(&shared.taken[warp]), taken_phase(range.message()));
      ptx::wgmma_wait<0>();
      ptx::wgmma_settle(scores[0]);
      if (threadIdx.x == first_thread) stamp_first<Traits>(params, Stamp::first_tile);
      const bool is_last = range.use + 1 == range.end;
      if (is_last) release_query(place);
      release_last_columns(range.use);
      bool has_others = false;
      if (may_hide) [[unlikely]]
        has_others = prepare(scores, place, range.use);
      if constexpr (Shared::is_selected) hide_missing(scores, range.use);
      hand_over(softmax, scores, range, has_others, is_taken);
      if (is_last) return;
      issue_products(scores, range.use + 1, next);
    }
  }
  // Applies prepare_scores to a block that may need it. Returns whether the block has tokens outside of the unit.
  FP_DEVICE bool prepare(Scores& scores, const WidePlace& place, u32 use) const {
    const i32 first = place.first_token + static_cast<int>(use - place.use(0)) * tokens;
    prepare_scores<Traits>(scores, place, rows_of(place), first);
    const Unit& unit = place.place.unit;
    return first < unit.kv_begin || first + tokens > unit.kv_end;
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
  // Lets a pair's products of the earlier block's values begin, when those of this block's scores are almost complete.
  // Before that they would take the tensor cores and shared memory from these scores, for whose probabilities the other
  // CTA waits, too.
  FP_DEVICE static void let_values_begin(u32 scored) {
    if constexpr (is_pair) ptx::mbarrier_arrive(scored);
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

  // Issues scores = Q K^T in two groups. When the first one is complete, a pair releases its columns, and its products
  // of values may begin. Columns come in the order in which their memory is free.
  FP_DEVICE void issue_products(Scores& scores, u32 use, const Keys& keys) const {
    if constexpr (is_pair) {
      issue_kept<0, held_tail>(scores, keys, use, false);
      issue_kept<1>(scores, keys, use, true);
      issue_tail<0>(scores, keys, use, true);
      issue_passing<0>(scores, use);
      ptx::wgmma_commit();
      issue_passing<1>(scores, use);
    } else {
      issue_tail<none_held>(scores, keys, use, false);
      issue_kept<0>(scores, keys, use, Shared::tail_panels > 0);
      issue_kept<1>(scores, keys, use, true);
      issue_kept<2>(scores, keys, use, true);
      ptx::wgmma_commit();
      issue_kept<3>(scores, keys, use, true);
    }
    ptx::wgmma_commit();
  }
  FP_DEVICE Keys keys_of(u32 use) const {
    const WideQuarter first = shared.kept_quarter(0, use);
    const bool have_arrived = is_pair && ptx::mbarrier_test(ptx::shared_address(first.full), first.phase);
    const ptx::Matrix kept = matrix_at(shared.kept_values[Shared::slot(use)]);
    const ptx::Matrix query = query_at(first.first_panel);
    if constexpr (is_pair || Shared::tail_panels == 0) return {kept, query, kept, have_arrived};
    return {kept, query, matrix_at(shared.tails[Shared::tail_slot(use)]), have_arrived};
  }
  FP_DEVICE ptx::Matrix query_at(int panel) const {
    return matrix_of_cta(shared.query).moved_by(panel * Tile::panel_bytes);
  }
  template <int held_at>
  FP_DEVICE void issue_tail(Scores& scores, const Keys& keys, u32 use, bool accumulate) const {
    if constexpr (Shared::tail_panels > 0) {
      const ptx::Matrix tail = is_pair ? matrix_of_cta(shared.tails[0]) : keys.tail;
      issue_panels<Shared::tail_panels, held_at>(scores, shared.tail_of(use), tail, 0, query_at(Shared::value_panels),
                                                 0, accumulate);
    }
  }
  template <int i, int held_at = none_held>
  FP_DEVICE void issue_kept(Scores& scores, const Keys& keys, u32 use, bool accumulate) const {
    constexpr int byte = i * Shared::quarter_bytes;
    constexpr int query_byte = is_pair ? byte : Shared::panel_of_quarter(i) * Tile::panel_bytes;
    issue_panels<Shared::quarter_panels, held_at>(scores, shared.kept_quarter(i, use), keys.kept, byte,
                                                  keys.query_of_kept, query_byte, accumulate,
                                                  i == 0 && keys.have_arrived);
  }
  template <int i>
  FP_DEVICE void issue_passing(Scores& scores, u32 use) const {
    const WideQuarter at = shared.passing_quarter(i, use);
    issue_panels<Shared::quarter_panels, none_held>(scores, at, matrix_of_cta(shared.passing_values[i]), 0,
                                                    query_at(at.first_panel), 0, true);
  }
  // `held_at`: where Q's panels are among those that are held.
  template <int panels, int held_at>
  FP_DEVICE void issue_panels(Scores& scores, const WideQuarter& at, const ptx::Matrix& keys, int key_byte,
                              const ptx::Matrix& query, int query_byte, bool accumulate,
                              bool have_arrived = false) const {
    if (!have_arrived) ptx::mbarrier_wait(ptx::shared_address(at.full), at.phase);
    ptx::wgmma_fence();  // after a wait the compiler would insert one, and serialise products
#pragma unroll
    for (int step = 0; step < panels * 4; ++step) {
      const int offset = step / 4 * Tile::panel_bytes + step % 4 * 32;
      const u64 key = keys.at(key_byte + offset);
      if constexpr (held_at != none_held) {
        Traits::HeldKeyProduct::multiply(scores[0], held[held_at * 4 + step], key, accumulate || step > 0);
      } else {
        Traits::KeyProduct::multiply(scores[0], query.at(query_byte + offset), key, accumulate || step > 0);
      }
    }
  }

  // Maxima always move: values are multiplied while the next block's products of scores run. Probabilities are passed
  // on by 16 tokens, so that few registers hold packed ones, and the first ones are computed before the wait for
  // readers.
  FP_DEVICE void hand_over(Softmax& softmax, Scores& scores, const BlockRange& range, bool has_others,
                           bool is_taken) const {
    const float scale = range.scale;
    float top[1][2], factor[1][2] = {{1.f, 1.f}};
    // Readers have mostly taken the last message by now, so that one vote is enough for both questions.
    const bool outgrown = softmax.outgrows(scores, scale, 0.f, top);
    if (__any_sync(0xffffffff, outgrown || !is_taken)) {
      if (!is_taken) wait_until_taken(range.message());
      if (__any_sync(0xffffffff, outgrown)) softmax.move_to(top, scale, factor);
    }
    pass(make_float2(Shared::marked(factor[0][0], has_others), Shared::marked(factor[0][1], has_others)));
#pragma unroll
    for (int step = 0; step < steps; ++step) {
      float (&of_step)[1][2][4] = *reinterpret_cast<float (*)[1][2][4]>(scores[0][2 * step]);
      softmax.exponentiate(of_step, scale);
      u32 probabilities[1][4];
      pack_probabilities<typename Traits::Cache>(of_step, probabilities);
      send(step, probabilities[0]);
    }
    end_message();
  }
  // Writes the probabilities of 16 tokens for this CTA and, in a pair, for the other one.
  FP_DEVICE void send(int step, const u32 (&words)[4]) const {
    shared.probabilities[0][step][thread] = make_uint4(words[0], words[1], words[2], words[3]);
    if constexpr (is_pair) {
      const float4 same = make_float4(__uint_as_float(words[0]), __uint_as_float(words[1]), __uint_as_float(words[2]),
                                      __uint_as_float(words[3]));
      ptx::store_async(peer_probabilities + step * static_cast<u32>(sizeof(shared.probabilities[1][0])), same,
                       peer_received);
    }
  }
  // Readers have written nothing for this warp, so that a wait of one CTA's scope is enough.
  FP_DEVICE void wait_until_taken(u32 message) const {
    ptx::mbarrier_wait(ptx::shared_address(&shared.taken[warp]), taken_phase(message));
  }
  FP_DEVICE static u32 taken_phase(u32 message) { return (message & 1) ^ 1; }
  // Passes the factors, or sums, of a lane's two rows to both CTAs. All lanes of a row write, each to its own place:
  // there is no asynchronous store with a predicate, and a branch takes longer.
  FP_DEVICE void pass(const float2& of_rows) const {
    shared.factors[0][thread] = of_rows;
    if constexpr (is_pair) ptx::store_async(peer_factors, of_rows, peer_received);
  }
  FP_DEVICE void end_message() const { ptx::mbarrier_arrive(ptx::shared_address(&shared.handed_over[warp])); }
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
    wait_until_taken(Shared::message(place, place.use(place.blocks)));
    pass(make_float2(totals[0], totals[1]));
    end_message();
  }

  FP_DEVICE WarpRows rows_of(const WidePlace& place) const {
    return {params, place.place.item, place.place.unit, Shared::first_row() + warp * 16, lane};
  }
};

}  // namespace flashpage
