// The computing warpgroups of latent_columns_sm90.
#pragma once
#include "flashpage/kernels/latent_columns_sm90/exchange.h"
#include "flashpage/kernels/latent_columns_sm90/output.h"
#include "flashpage/kernels/wide_scores.h"
#include "flashpage/ptx/fence.h"
#include "flashpage/ptx/wgmma.h"
#include "flashpage/tile/softmax/sinks.h"
#include "flashpage/tile/trace.h"

namespace flashpage {

// A warpgroup sums the values of 64 rows in the CTA's value columns. Converting rows is slower than the products, so
// each product ends before the next step begins, and a block's slot is free early. The other warpgroup's products run
// during this one's exponentials.
template <class Traits>
struct ColumnsCompute {
  using Shared = ColumnsShared<Traits>;
  using Tile = typename Shared::Tile;
  using Cache = typename Traits::Cache;
  using Output = ColumnsOutput<Traits>;
  using Values = typename Output::Values;
  static constexpr int tokens = Shared::tokens, steps = tokens / 16;
  static constexpr u32 first_thread = Shared::Warps::loading * 32;  // of the computing ones
  using Scores = float[1][tokens / 8][4];
  using Fragments = u32[steps][4];
  using Softmax = WideSoftmax;

  Shared& shared;
  const AttentionParams& params;
  ScoreExchange<Traits> exchange;
  int thread = threadIdx.x % 128;  // of the warpgroup
  int warp = thread / 32, lane = threadIdx.x % 32;
  int group = threadIdx.x / 128 - Shared::Warps::loading / 4;

  FP_DEVICE ColumnsCompute(Shared& shared, const AttentionParams& params)
      : shared(shared), params(params), exchange(shared) {}

  FP_DEVICE void run() {
    if (threadIdx.x == first_thread) stamp<Traits>(params, Stamp::start);
    for (u32 unit_use = 0;;) {
      shared.place_ring.wait_full(unit_use);
      const WidePlace& place = shared.places[shared.place_ring.slot(unit_use)];
      if (place.place.done) break;
      shared.query_ring.wait_full(unit_use);
      ptx::fence_before_products();  // Q was copied by cp.async
      run_unit(place);
      unit_use = place.units_before + 1;
      shared.place_ring.release(unit_use - 1);
    }
    if (threadIdx.x == first_thread) {
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
    Scores& product;  // this CTA's terms of scores, in flight
    float (&factor)[1][2];
  };

  FP_DEVICE void run_unit(const WidePlace& place) {
    Values values = {};
    Scores scores, product;
    Softmax softmax;
    softmax.clear();
    float factor[1][2];
    State state{place, softmax, values, scores, product, factor};
    const bool has_sinks = params.sinks && !(Shared::takes_turns && group == 1);
    if (has_sinks) begin_with_sinks(softmax, rows_of(place));
    if constexpr (Shared::takes_turns) {
      attend(state, group, 2);
    } else {
      attend(state, 0, 1);
    }
    if (threadIdx.x == first_thread) stamp<Traits>(params, Stamp::last_tile);
    const Output output{shared, params, place.place, first_row() + warp * 16 + lane / 4, lane};
    if constexpr (Shared::takes_turns) {
      if (group == 0) {
        output.template write_half<0>(softmax, values, place.blocks, place.units_before);
      } else {
        output.template write_half<1>(softmax, values, place.blocks, place.units_before);
      }
      if (place.blocks > group) exchange.release();  // of the last block: its memory has also passed values
    } else {
      output.write(softmax, values);
    }
    if (threadIdx.x == first_thread) stamp<Traits>(params, Stamp::written);
  }

  // `number`: how many blocks this warp had before this one.
  FP_DEVICE void multiply_keys(State& state, u32 of_use, u32 number) {
    issue_keys(state.product, of_use);
    ptx::wgmma_wait<0>();
    take_product(state);
    if (threadIdx.x == first_thread) stamp_first<Traits>(params, Stamp::first_tile);
    exchange.send(state.scores, number);
  }

  // Each `stride`-th block of the unit, from the block `first` on.
  FP_DEVICE void attend(State& state, int first, int stride) {
    const int blocks = state.place.blocks;
#pragma unroll 1
    for (int block = first; block < blocks; block += stride) {
      const u32 now = state.place.use(block);
      const u32 number = Shared::takes_turns ? state.place.use_of_parity(block) : now;
      multiply_keys(state, now, number);
      const bool goes_on = block + stride < blocks;
      if (!goes_on) release_query(state.place);
      Fragments probabilities;
      make_probabilities(state, probabilities, block, now, number, goes_on || !Shared::takes_turns);
      add_values(state, probabilities, block, now);
    }
    if (blocks <= first) release_query(state.place);
  }
  FP_DEVICE void add_values(State& state, Fragments& probabilities, int block, u32 of_use) {
    issue_values(state.values, probabilities, of_use);
    ptx::wgmma_wait<0>();
    ptx::wgmma_settle(state.values[0]);
    ptx::wgmma_settle(probabilities);
    shared.release(of_use, lane);
  }

  // The warpgroup's first row in the unit.
  FP_DEVICE int first_row() const { return Shared::takes_turns ? 0 : group * Shared::group_rows; }
  FP_DEVICE WarpRows rows_of(const WidePlace& place) const {
    return {params, place.place.item, place.place.unit, first_row() + warp * 16, lane};
  }
  FP_DEVICE void release_query(const WidePlace& place) const {
    if (lane == 0) shared.query_ring.release(place.units_before);
  }

  // Issues product = Q K^T for this CTA's columns.
  FP_DEVICE void issue_keys(Scores& product, u32 of_use) const {
    const u32 query_tile = ptx::shared_address(shared.query[Shared::takes_turns ? 0 : group]);
    const ptx::Matrix query(query_tile, 0), keys(shared.block(of_use), 0);
    wait_for_part(of_use, ColumnsPart::first);
#pragma unroll
    for (int panel = 0; panel < Tile::part_panels; ++panel) issue_panel(product, query, keys, panel);
    wait_for_part(of_use, ColumnsPart::second);
#pragma unroll
    for (int panel = Tile::part_panels; panel < Tile::panels; ++panel) issue_panel(product, query, keys, panel);
    if constexpr (Tile::tail_columns > 0) {
      const ptx::NarrowMatrix query_tail(query_tile + Tile::tail), tail(shared.block(of_use) + Tile::tail);
      wait_for_part(of_use, ColumnsPart::tail);
#pragma unroll
      for (int step = 0; step < Tile::tail_columns / 16; ++step)
        Traits::KeyProduct::multiply(product[0], query_tail.at(step * 32), tail.at(step * 32), true);
    }
    ptx::wgmma_commit();
  }
  FP_DEVICE void wait_for_part(u32 of_use, ColumnsPart part) const {
    shared.wait_full(of_use, part);
    ptx::wgmma_fence();  // after a wait the compiler would insert one, and serialise products
  }
  FP_DEVICE static void issue_panel(Scores& product, const ptx::Matrix& query, const ptx::Matrix& keys, int panel) {
#pragma unroll
    for (int step = 0; step < Tile::panel_columns / 16; ++step) {
      const int offset = panel * Tile::panel_bytes + step * 32;
      Traits::KeyProduct::multiply(product[0], query.at(offset), keys.at(offset), panel > 0 || step > 0);
    }
  }
  // Issues values += P V.
  FP_DEVICE void issue_values(Values& values, const Fragments& probabilities, u32 of_use) const {
    const ptx::Matrix tile(shared.block(of_use), Tile::panel_bytes);
    constexpr int columns = Traits::ValueProduct::columns, product_tiles = columns / 8;
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < steps; ++step)
#pragma unroll
      for (int first = 0; first < Tile::value_columns; first += columns)
        Traits::ValueProduct::multiply(
            reinterpret_cast<float (&)[product_tiles][4]>(values[0][first / 8]), probabilities[step],
            tile.at(first / Tile::panel_columns * Tile::panel_bytes + step * 16 * 128), true);
    ptx::wgmma_commit();
  }

  // Makes a finished product the block's scores. Products straight into the scores make rows of 584 bytes spill.
  FP_DEVICE static void take_product(State& state) {
    ptx::wgmma_settle(state.product[0]);
#pragma unroll
    for (int n = 0; n < tokens / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) state.scores[0][n][e] = state.product[0][n][e];
  }

  FP_DEVICE static float softmax_scale(const State& state) { return softmax_scale_of<Traits>(state.place.scale, {}); }

  // `number`: as multiply_keys. `releases`: whether the other CTA may send the next block's sums at once.
  FP_DEVICE void make_probabilities(State& state, Fragments& probabilities, int block, u32 of_use, u32 number,
                                    bool releases) {
    exchange.receive(state.scores, number);
    if (releases) exchange.release();
    prepare_scores<Traits>(state.scores, state.place, rows_of(state.place), state.place.first_token + block * tokens);
    if constexpr (Shared::is_selected) hide_missing(state.scores, shared.present[Shared::slot(of_use)]);
    if (state.softmax.raise(state.scores, softmax_scale(state), state.factor))
      state.softmax.rescale(state.values, state.factor);
    state.softmax.exponentiate(state.scores, softmax_scale(state));
    pack_probabilities<Cache>(state.scores, probabilities);
  }

  // Hides the places of a list that have no token. Only the lane that releases the slot reads them: racecheck does not
  // order other lanes' reads before the release.
  FP_DEVICE void hide_missing(Scores& scores, const typename Shared::Present (&of_slot)[tokens / 32]) const {
    static_assert(tokens == 64, "two words of 32 tokens");
    typename Shared::Present present[2] = {};
    if (lane == 0) present[0] = of_slot[0], present[1] = of_slot[1];
#pragma unroll
    for (auto& word : present) word.bits = __shfl_sync(0xffffffff, word.bits, 0);
    if ((present[0].bits & present[1].bits) == 0xffffffff) return;
#pragma unroll
    for (int n = 0; n < tokens / 8; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (!present[n / 4].has(n % 4 * 8 + lane % 4 * 2 + e))
          scores[0][n][e] = scores[0][n][e + 2] = ptx::negative_infinity();
  }
};

}  // namespace flashpage
