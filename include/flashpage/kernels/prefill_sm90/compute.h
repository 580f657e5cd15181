// The computing warpgroups of prefill_sm90 for 16-bit factors.
#pragma once
#include "flashpage/kernels/prefill_sm90/warpgroup.h"
#include "flashpage/ptx/compiler.h"
#include "flashpage/tile/softmax/softmax_by_sum.h"

namespace flashpage {

// While a group exponentiates the scores of one tile, the tensor cores multiply the probabilities of the tile before
// with their values, and the products of another group: the groups issue in a fixed order.
template <class Traits>
struct PrefillCompute : PrefillWarpgroup<Traits> {
  using Base = PrefillWarpgroup<Traits>;
  using typename Base::KeyProduct;
  using typename Base::S;
  using typename Base::Scores;
  using typename Base::Shared;
  using typename Base::Sums;
  using typename Base::Values;
  using typename Base::Warps;
  using ShortKeyProduct = typename Traits::ShortKeyProduct;
  using Softmax = SoftmaxBySum<Traits>;
  static constexpr int tokens = Base::tokens;
  static constexpr int short_tokens =
      ShortKeyProduct::columns;  // width of a last tile with few tokens; 0: there are no short tiles

  // Whether scores are transformed while the values of the tile before are multiplied: a soft cap takes longer than
  // they do.
  static constexpr bool overlaps_transform = approximates_tanh<Traits> && !has_mask_tiles<Traits>;

  using Base::order;
  using Base::params;
  using Base::pipeline;

  using Base::Base;

  FP_DEVICE void run() {
    this->run_units([&](Scores& scores) { attend(scores); });
  }

 private:
  // The state that a warp keeps from tile to tile of its unit.
  struct Unit {
    UnitTiles<Traits>& tiles;
    const ScoreRules<Traits>& rules;
    Sums& values;
    float (&factor)[1][2];
    SoftmaxState<1>& state;
    Probabilities<Traits, tokens / 8>& probabilities;
  };

  // Computes a unit whose first scores are ready; on return those of the next unit are.
  FP_DEVICE void attend(Scores& scores) {
    UnitTiles<Traits> tiles(pipeline);
    const ScoreRules<Traits> rules(params, this->args, pipeline, this->first_row, this->lane);
    pipeline.begin_unit();
    Sums values = {};
    float factor[1][2];
    SoftmaxState<1> state;
    state.clear();
    if (params.sinks) begin_with_sinks(state, rules.rows);
    ignore_absent_rows(state, rules.rows);
    rules.apply(scores, tiles);
    Probabilities<Traits, tokens / 8> probabilities;
    Softmax::begin(state, scores, probabilities, rules.softmax_scale);
    Unit unit{tiles, rules, values, factor, state, probabilities};
#pragma unroll 1
    while (tiles.next(short_tokens)) step<KeyProduct>(unit, scores);
    finish(unit, scores);
    pipeline.release_values();
    this->end_unit(rules.tiled, state, values, pipeline.query(pipeline.unit_use - 1), scores);
  }

  // Computes a tile, or the short one: its scores together with the values of the tile before.
  template <class Product>
  FP_DEVICE void step(Unit& unit, Scores& all_scores) {
    auto& scores = reinterpret_cast<float (&)[1][Product::columns / 8][4]>(all_scores);
    pipeline.next_keys();
    if constexpr (Warps::by_rows) pipeline.wait_values(pipeline.use - 1);
    order.wait();
    this->template issue_scores<Product>(scores[0]);
    if constexpr (!Warps::by_rows) pipeline.wait_values(pipeline.use - 1);
    issue_values<tokens>(unit, true);
    pipeline.look_ahead();
    if constexpr (overlaps_transform) {
      ptx::wgmma_wait<1>();
      ptx::wgmma_settle(scores[0]);
      pipeline.release_keys();
      unit.rules.transform(scores, unit.tiles);
      ptx::wgmma_wait<0>();
      ptx::wgmma_settle(unit.values[0]);
      pipeline.release_values();
      unit.rules.mask(scores, unit.tiles);
    } else {
      // Waits for both: the value product ends only some ten cycles after it could be issued, and then both slots are
      // free.
      ptx::wgmma_wait<0>();
      ptx::wgmma_settle(scores[0]);
      ptx::wgmma_settle(unit.values[0]);
      pipeline.release_keys();
      pipeline.release_values();
      unit.rules.apply(scores, unit.tiles);
    }
    if (Softmax::run(unit.state, scores, unit.probabilities, unit.rules.softmax_scale, unit.factor))
      unit.state.rescale(unit.values, unit.factor);
  }
  // Computes the last tile, if it is short, and the last values.
  FP_DEVICE void finish(Unit& unit, Scores& scores) {
    bool is_short = false;
    if constexpr (short_tokens > 0) {
      is_short = unit.tiles.ends_short();
      ptx::forget(scores[0]);
      if (is_short) {
        step<ShortKeyProduct>(unit, scores);
        ptx::forget(scores[0]);
        multiply_last<ShortKeyProduct>(unit, scores);
      }
    }
    if (!is_short) multiply_last<KeyProduct>(unit, scores);
  }
  template <class Product>
  FP_DEVICE void multiply_last(Unit& unit, Scores& scores) {
    Base::multiply_last(scores, unit.values, [&] { issue_values<Product::columns>(unit, false); });
  }

  // Issues values += P V for the first `used` tokens of a tile. `passes`: signals the next group shortly before the
  // last step, so that its products follow without a gap.
  template <int used>
  FP_DEVICE void issue_values(Unit& unit, bool passes) const {
    constexpr int steps = used / 16;
    const ptx::Matrix tile(pipeline.values(), Values::panel_bytes);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < steps; ++step) {
      if (passes && step == steps - 2) order.pass();
      Traits::ValueProduct::multiply(unit.values[0], unit.probabilities.fragment[step][0], tile.at(step * 16 * 128),
                                     true);
    }
    ptx::wgmma_commit();
  }
};

}  // namespace flashpage
