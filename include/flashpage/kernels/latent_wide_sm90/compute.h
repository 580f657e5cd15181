// The computing warpgroups of latent_wide_sm90.
#pragma once
#include "flashpage/kernels/latent_wide_sm90/output.h"
#include "flashpage/kernels/wide_scores.h"
#include "flashpage/ptx/fence.h"
#include "flashpage/ptx/named_barrier.h"
#include "flashpage/ptx/wgmma.h"
#include "flashpage/tile/softmax/sinks.h"
#include "flashpage/tile/trace.h"

namespace flashpage {

// The left warpgroup computes the probabilities of a pair's first block, the right one those of its second, and each
// sums its half of the value columns. Warps of both with the same rows pass each other probabilities and maxima: a
// thread's fragments are those that the same thread of the other warpgroup needs. Maxima only rise from block to block,
// and values follow them before the block's product is added.
//
//   left:   K0 | softmax 0      | V0 left, V1 left | K0' | ...
//   right:  K1 | V0 right and softmax 1 | V1 right | K1' | ...
template <class Traits>
struct WideCompute {
  using Shared = WideShared<Traits>;
  using Tile = typename Shared::Tile;
  using Cache = typename Traits::Cache;
  using Output = WideOutput<Traits>;
  using Values = typename Output::Values;
  static constexpr int tokens = Shared::tokens, steps = tokens / 16;
  static constexpr int vote_barrier = 1;  // of the right warpgroup, by name
  using Scores = float[1][tokens / 8][4];
  using Fragments = u32[steps][4];
  using Softmax = WideSoftmax;

  Shared& shared;
  const AttentionParams& params;
  int thread = threadIdx.x % 128;  // of the warpgroup
  int warp = thread / 32, lane = threadIdx.x % 32;
  int group = threadIdx.x / 128 - 1;
  u32 unit_use = 0;  // units before this one
  u32 phases = 0;    // bit 0: of the probabilities that this warp takes over; bit 1: of this warpgroup's clearings

  FP_DEVICE WideCompute(Shared& shared, const AttentionParams& params) : shared(shared), params(params) {}

  FP_DEVICE void run() {
    if (threadIdx.x == 128) stamp<Traits>(params, Stamp::start);
    if (group == 0) {
      run_units<WidePart::left>();
    } else {
      run_units<WidePart::right>();
    }
    if (threadIdx.x == 128) {
      stamp<Traits>(params, Stamp::end);
      stamp<Traits>(params, Stamp::sm);
    }
  }

 private:
  // What a warpgroup keeps from block to block of a unit.
  struct State {
    const WidePlace& place;
    Softmax& softmax;
    Values& values;
    Scores& scores;
    float (&factor)[1][2];
  };

  template <WidePart half>
  FP_DEVICE void run_units() {
    for (;; ++unit_use) {
      shared.place_ring.wait_full(unit_use);
      const WidePlace& place = shared.places[shared.place_ring.slot(unit_use)];
      if (place.place.done) return;
      shared.query_ring.wait_full(unit_use);
      ptx::fence_before_products();  // Q was copied by cp.async
      Values values = {};
      Scores scores;
      Softmax softmax;
      softmax.clear();
      float factor[1][2];
      State state{place, softmax, values, scores, factor};
      if constexpr (half == WidePart::left) {
        if (params.sinks) begin_with_sinks(softmax, rows_of(place));
        attend_left(state);
      } else {
        attend_right(state);
      }
      if (threadIdx.x == 128) stamp<Traits>(params, Stamp::last_tile);
      const int first_row = cta_row();
      Output{shared, params, place.place, group, warp * 16 + lane / 4, first_row, lane}.write(
          softmax, values, [&](u32 phase) { meet_at(shared.met[warp], phase); });
      if (threadIdx.x == 128) stamp<Traits>(params, Stamp::written);
      shared.place_ring.release(unit_use);
    }
  }

  FP_DEVICE void attend_left(State& state) {
    const int blocks = state.place.blocks;
    if (blocks == 0) return release_query();
    u32 now = state.place.use(0);
    begin_keys(state.scores, now);
    end_keys(state.scores, now);
    ptx::wgmma_wait<0>();
    ptx::wgmma_settle(state.scores[0]);
    if (threadIdx.x == 128) stamp_first<Traits>(params, Stamp::first_tile);
#pragma unroll 1
    for (int block = 0; block < blocks; block += 2, now += 2) {
      const bool has_second = block + 1 < blocks, goes_on = block + 2 < blocks;
      release(now, WidePart::tail);
      if (!goes_on) release_query();
      prepare(state, block);
      const bool rose = state.softmax.raise(state.scores, softmax_scale(state), state.factor);
      Fragments first, second;
      exponentiate(state, first);
      hand_over(state, first);
      if (rose) rescale(state);  // no product is in flight
      clear_hidden(state.place, block, now, WidePart::left);
      issue_values(state.values, first, now, WidePart::left);
      if (has_second) {
        // The other warpgroup still computes its probabilities, and these columns can be refilled meanwhile.
        ptx::wgmma_wait<0>();
        ptx::wgmma_settle(first);
        ptx::wgmma_settle(state.values[0]);
        release(now, WidePart::left);
        if (take_over(state, second)) rescale(state);
        clear_hidden(state.place, block + 1, now + 1, WidePart::left);
        issue_values(state.values, second, now + 1, WidePart::left);
        if (goes_on) {
          begin_keys(state.scores, now + 2);
          ptx::wgmma_wait<1>();
          ptx::wgmma_settle(second);
          release(now + 1, WidePart::left);
          end_keys(state.scores, now + 2);
        }
      }
      ptx::wgmma_wait<0>();
      ptx::wgmma_settle(state.scores[0]);
      ptx::wgmma_settle(state.values[0]);
      if (!has_second) ptx::wgmma_settle(first);
      if (has_second) ptx::wgmma_settle(second);
      if (!goes_on) release(has_second ? now + 1 : now, WidePart::left);
    }
  }

  FP_DEVICE void attend_right(State& state) {
    const int blocks = state.place.blocks;
    u32 now = state.place.use(0);
    if (blocks >= 2) {
      attend_pairs(state, now);
    } else {
      release_query();
    }
    if (blocks % 2 != 0) {
      Fragments first;
      add_first(state, first, blocks - 1, now);
      ptx::wgmma_wait<0>();
      ptx::wgmma_settle(state.values[0]);
      ptx::wgmma_settle(first);
      release(now, WidePart::right);
    }
  }
  // The pairs of blocks. The loop has its exit in the middle, because otherwise the compiler waits for the scores that
  // are in flight at its end.
  FP_DEVICE void attend_pairs(State& state, u32& now) {
    begin_keys(state.scores, now + 1);
    end_keys(state.scores, now + 1);
    for (int block = 0;; block += 2, now += 2) {
      Fragments first, second;
      add_first(state, first, block, now);
      ptx::wgmma_wait<1>();
      ptx::wgmma_settle(state.scores[0]);
      release(now + 1, WidePart::tail);
      const bool goes_on = block + 3 < state.place.blocks;
      if (!goes_on) release_query();
      prepare(state, block + 1);
      const bool rose = state.softmax.raise(state.scores, softmax_scale(state), state.factor);
      exponentiate(state, second);
      hand_over(state, second);
      rescale_together(state, rose);
      clear_hidden(state.place, block + 1, now + 1, WidePart::right);
      issue_values(state.values, second, now + 1, WidePart::right);
      ptx::wgmma_wait<1>();
      ptx::wgmma_settle(first);
      release(now, WidePart::right);
      ptx::wgmma_wait<0>();
      ptx::wgmma_settle(state.values[0]);
      ptx::wgmma_settle(second);
      release(now + 1, WidePart::right);
      if (!goes_on) break;
      begin_keys(state.scores, now + 3);
      end_keys(state.scores, now + 3);
    }
    now += 2;
  }
  // Issues the product of a pair's first block.
  FP_DEVICE void add_first(State& state, Fragments& first, int block, u32 now) {
    rescale_together(state, take_over(state, first));
    clear_hidden(state.place, block, now, WidePart::right);
    issue_values(state.values, first, now, WidePart::right);
  }

  // The first row of a unit that belongs to this CTA.
  FP_DEVICE static int cta_row() { return static_cast<int>(ptx::rank_among<Traits::ctas>()) * Shared::rows; }
  FP_DEVICE WarpRows rows_of(const WidePlace& place) const {
    return {params, place.place.item, place.place.unit, cta_row() + warp * 16, lane};
  }
  FP_DEVICE void release(u32 of_use, WidePart part) const {
    if (part != WidePart::tail || Shared::tail_panels > 0) shared.release(of_use, part, lane);
  }
  FP_DEVICE void release_query() const {
    if (lane == 0) shared.query_ring.release(unit_use);
  }

  // Issues scores = Q K^T: the columns that arrive first, and then the others.
  FP_DEVICE void begin_keys(Scores& scores, u32 of_use) const {
    issue_panel(scores, of_use, Shared::tail_panels > 0 ? Shared::value_panels : 0, false);
    ptx::wgmma_commit();
  }
  FP_DEVICE void end_keys(Scores& scores, u32 of_use) const {
#pragma unroll
    for (int panel = Shared::tail_panels > 0 ? 0 : 1; panel < Shared::value_panels; ++panel)
      issue_panel(scores, of_use, panel, true);
    ptx::wgmma_commit();
  }
  FP_DEVICE void issue_panel(Scores& scores, u32 of_use, int panel, bool accumulate) const {
    const ptx::Matrix query(ptx::shared_address(shared.query), 0), keys(shared.block(of_use), 0);
    shared.wait_full(of_use, panel);
    ptx::wgmma_fence();  // after a wait the compiler would insert one, and serialise products
#pragma unroll
    for (int step = 0; step < Tile::panel_columns / 16; ++step)
      Traits::KeyProduct::multiply(scores[0], query.at(panel * Tile::panel_bytes + step * 32),
                                   keys.at(panel * Tile::panel_bytes + step * 32), accumulate || step > 0);
  }
  // Issues values += P V for half of V's columns.
  FP_DEVICE void issue_values(Values& values, const Fragments& probabilities, u32 of_use, WidePart half) const {
    const ptx::Matrix tile(shared.block(of_use) + Shared::first_panel(half) * Tile::panel_bytes, Tile::panel_bytes);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < steps; ++step)
      Traits::ValueProduct::multiply(values[0], probabilities[step], tile.at(step * 16 * 128), true);
    ptx::wgmma_commit();
  }

  FP_DEVICE static float softmax_scale(const State& state) { return softmax_scale_of<Traits>(state.place.scale, {}); }

  // Multiplies the values by the factor, which is rare.
  FP_DEVICE static void rescale(State& state) { state.softmax.rescale(state.values, state.factor); }
  // Multiplies them while products are in flight: if the maxima of any warp rose, all warps of the warpgroup wait for
  // all products, those of scores too, because the compiler does not know which ones are over. A warpgroup may only
  // wait as a whole.
  FP_DEVICE static void rescale_together(State& state, bool rose) {
    if (!ptx::named_barrier_or(vote_barrier, 128, rose)) return;
    ptx::wgmma_wait<0>();
    ptx::wgmma_settle(state.values[0]);
    if (rose) rescale(state);
  }

  FP_DEVICE void prepare(State& state, int block) const {
    prepare_scores<Traits>(state.scores, state.place, rows_of(state.place), state.place.first_token + block * tokens);
  }
  FP_DEVICE void exponentiate(State& state, Fragments& probabilities) const {
    state.softmax.exponentiate(state.scores, softmax_scale(state));
    pack_probabilities<Cache>(state.scores, probabilities);
  }

  // Passes probabilities and maxima to the same thread of the other warpgroup. It has read what it was passed before,
  // because it writes to the same place in turn.
  FP_DEVICE void hand_over(const State& state, const Fragments& probabilities) const {
#pragma unroll
    for (int step = 0; step < steps; ++step)
      shared.probabilities[step][thread] =
          make_uint4(probabilities[step][0], probabilities[step][1], probabilities[step][2], probabilities[step][3]);
    shared.maxima[thread] = make_float2(state.softmax.maximum[0][0], state.softmax.maximum[0][1]);
    ptx::mbarrier_arrive(ptx::shared_address(&shared.handed_over[group][warp]));
  }
  // Returns whether maxima rose; values must then be multiplied by the factor.
  FP_DEVICE bool take_over(State& state, Fragments& probabilities) {
    ptx::mbarrier_wait(ptx::shared_address(&shared.handed_over[1 - group][warp]), phases & 1);
    phases ^= 1;
#pragma unroll
    for (int step = 0; step < steps; ++step) {
      const uint4 words = shared.probabilities[step][thread];
      probabilities[step][0] = words.x;
      probabilities[step][1] = words.y;
      probabilities[step][2] = words.z;
      probabilities[step][3] = words.w;
    }
    const float2 maxima = shared.maxima[thread];
    const float next[2] = {maxima.x, maxima.y};
    float (&maximum)[2] = state.softmax.maximum[0];
    if (!__any_sync(0xffffffff, next[0] != maximum[0] || next[1] != maximum[1])) return false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      state.factor[0][half] = state_weight(maximum[half], next[half]);
      maximum[half] = next[half];
      state.softmax.sum[0][half] *= state.factor[0][half];
    }
    return true;
  }

  // Clears the values of tokens that the unit does not have: their memory may hold NaN, and 0 * NaN is NaN. The block's
  // scores are complete.
  FP_DEVICE void clear_hidden(const WidePlace& place, int block, u32 of_use, WidePart half) {
    const Unit& unit = place.place.unit;
    const i32 first = place.first_token + block * tokens;
    if (first >= unit.kv_begin && first + tokens <= unit.kv_end) return;
    u8* tile = shared.slots[Shared::slot(of_use)] + Shared::first_panel(half) * Tile::panel_bytes;
    constexpr int chunks = Shared::half_panels * 8;
    for (int i = thread; i < tokens * chunks; i += 128) {
      const int row = i / chunks, chunk = i % chunks;
      if (first + row >= unit.kv_begin && first + row < unit.kv_end) continue;
      *reinterpret_cast<uint4*>(tile + Tile::chunk_offset(row, chunk)) = make_uint4(0, 0, 0, 0);
    }
    ptx::fence_before_products();
    meet_at(shared.cleared[group], phases >> 1);
    phases ^= 2;
  }
};

}  // namespace flashpage
