// The computing warpgroups of prefill_sm90 for fp8 factors: Q, K, transposed V, and probabilities.
#pragma once
#include "flashpage/kernels/prefill_sm90/warpgroup.h"
#include "flashpage/tile/softmax/fp8_softmax.h"

namespace flashpage {

// The loop of PrefillCompute in another order, because exponentials take as long as products here: half of a tile's
// exponentials are computed while the next tile's scores are multiplied.
//
// Tensor cores truncate sums of fp8 products towards zero: over 2,048 tokens whose values have one sign the error is
// 2%, over 16,384 it is 23% (measured). So the sums of some tiles at a time are accumulated in shared memory.
template <class Traits>
struct PrefillFp8Compute : PrefillWarpgroup<Traits> {
  using Base = PrefillWarpgroup<Traits>;
  using typename Base::KeyProduct;
  using typename Base::S;
  using typename Base::Scores;
  using typename Base::Shared;
  using typename Base::Sums;
  using typename Base::Values;
  using Fp8 = typename Traits::Cache;
  static constexpr int tokens = Base::tokens, steps = tokens / 32;
  // Steps whose probabilities are computed later; with wider accumulators no registers are left for that.
  static constexpr int later = Traits::head_dim_vo <= 192 ? steps / 2 : 0;
  static constexpr bool has_sums = Shared::sum_bytes > 0;
  static constexpr int sum_tiles = 2048 / tokens;  // tiles between two accumulations

  using Base::group;
  using Base::order;
  using Base::params;
  using Base::pipeline;
  using Base::shared;
  using Base::thread;

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
    float (&sum_factor)[2];  // of the accumulated sums
    int& left;               // tiles until the next accumulation
    Fp8SoftmaxInParts& state;
    u32 (&probabilities)[steps][4];
    float (&exponents)[max_of(later, 1) * 4][4];
  };

  // Computes a unit whose first scores are ready; on return those of the next unit are.
  FP_DEVICE void attend(Scores& scores) {
    const ScoreRules<Traits> rules(params, this->args, pipeline, this->first_row, this->lane);
    UnitTiles<Traits> tiles(pipeline);
    pipeline.begin_unit();
    Sums values = {};
    float factor[1][2];
    float sum_factor[2] = {0.f, 0.f};  // nothing is accumulated yet
    int left = sum_tiles;
    Fp8SoftmaxInParts state;
    state.clear();
    if (params.sinks) {
      begin_with_sinks(state, rules.rows);
      state.lift_sums();
    }
    ignore_absent_rows(state, rules.rows);
    u32 probabilities[steps][4];
    float exponents[max_of(later, 1) * 4][4];
    Unit unit{tiles, rules, values, factor, sum_factor, left, state, probabilities, exponents};
    rules.transform(scores, tiles);
    rules.mask(scores, tiles);
    state.raise(scores, rules.softmax_scale, factor);
    soften(unit, scores);
#pragma unroll 1
    while (tiles.next(0)) step(unit, scores);
    soften_later(unit);
    this->multiply_last(scores, values, [&] { issue_values(unit, false); });
    pipeline.release_values();
    if constexpr (has_sums) add_sums(unit);
    state.lower_maxima();
    u8* const tile = has_sums ? shared.sums : pipeline.query(pipeline.unit_use - 1);
    this->end_unit(rules.tiled, state, values, tile, scores);
  }

  // Computes a tile's scores together with the values of the tile before.
  FP_DEVICE void step(Unit& unit, Scores& scores) {
    pipeline.next_keys();
    order.wait();
    this->template issue_scores<KeyProduct>(scores[0]);
    pipeline.wait_values(pipeline.use - 1);  // a branch: it keeps exponentials after the issue of the products
    if constexpr (later > 0) ptx::wgmma_settle(unit.exponents);
    soften_later(unit);
    issue_values(unit, true);
    pipeline.look_ahead();
    ptx::wgmma_wait<1>();
    ptx::wgmma_settle(scores[0]);
    pipeline.release_keys();
    unit.rules.transform(scores, unit.tiles);
    unit.rules.mask(scores, unit.tiles);
    const bool outgrown = unit.state.raise(scores, unit.rules.softmax_scale, unit.factor);
    ptx::wgmma_wait<0>();
    ptx::wgmma_settle(unit.values[0]);
    pipeline.release_values();
    if (outgrown) rescale(unit);
    if (has_sums && --unit.left == 0) {
      unit.left = sum_tiles;
      add_sums(unit);
      keep_sums(unit);
    }
    soften(unit, scores);
  }

  FP_DEVICE static void soften(Unit& unit, const Scores& scores) {
    unit.state.template soften<Fp8, later>(unit.probabilities, unit.exponents, scores, unit.rules.softmax_scale);
  }
  FP_DEVICE static void soften_later(Unit& unit) {
    unit.state.template soften_later<Fp8, later>(unit.probabilities, unit.exponents);
  }
  FP_DEVICE static void rescale(Unit& unit) {
    unit.state.rescale(unit.values, unit.factor);
    unit.sum_factor[0] *= unit.factor[0][0];
    unit.sum_factor[1] *= unit.factor[0][1];
  }

  // Issues values += P V. `passes`: signals the next group shortly before the last step, so that its products follow
  // without a gap.
  FP_DEVICE void issue_values(Unit& unit, bool passes) const {
    const ptx::Matrix tile(pipeline.values(), 0);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < steps; ++step) {
      if (passes && step == max_of(0, steps - 2)) order.pass();
      Traits::ValueProduct::multiply(unit.values[0], unit.probabilities[step],
                                     tile.at(step / 4 * Values::panel_bytes + step % 4 * 32), true);
    }
    ptx::wgmma_commit();
  }

  // The address of the thread's sums for tile n of its values: among those of its group, where the group's output will
  // be.
  FP_DEVICE u32 sum_address(int n) const {
    return ptx::shared_address(shared.sums) + n / 4 * 16384 + group * 8192 + n % 4 * 2048 + thread % 128 * 16;
  }
  FP_DEVICE void add_sums(Unit& unit) const {
    const float (&sum_factor)[2] = unit.sum_factor;
    // Factors of absent rows may be NaN before anything is accumulated.
    if (!__any_sync(0xffffffff, sum_factor[0] > 0.f || sum_factor[1] > 0.f)) return;
#pragma unroll
    for (int n = 0; n < S::value_tiles; ++n) {
      u32 sums[4];
      ptx::load_shared(sums, sum_address(n));
#pragma unroll
      for (int e = 0; e < 4; ++e)
        unit.values[0][n][e] = fmaf(__int_as_float(static_cast<int>(sums[e])), sum_factor[e / 2], unit.values[0][n][e]);
    }
  }
  FP_DEVICE void keep_sums(Unit& unit) const {
    const auto bits = [&](int n, int e) { return static_cast<u32>(__float_as_int(unit.values[0][n][e])); };
#pragma unroll
    for (int n = 0; n < S::value_tiles; ++n) {
      ptx::store_shared(sum_address(n), bits(n, 0), bits(n, 1), bits(n, 2), bits(n, 3));
#pragma unroll
      for (int e = 0; e < 4; ++e) unit.values[0][n][e] = 0.f;
    }
    unit.sum_factor[0] = unit.sum_factor[1] = 1.f;
  }
};

}  // namespace flashpage
