// The computing warpgroups of prefill_sm90 where all factors are fp8: Q, K, V transposed, and the probabilities too.
#pragma once
#include "flashpage/kernels/prefill_sm90/compute.h"
#include "flashpage/tile/softmax/fp8_softmax.h"

namespace flashpage {

// PrefillCompute with another inner loop, as exponentials take as long as products here: half of a tile's are computed
// while the next tile's scores are multiplied.
//
// Tensor cores cut a sum of fp8 products off, always towards zero: over 2,048 tokens whose values have one sign that
// is 2%, over 16,384 it is 23% (measured). So sums of some tiles at a time are added up in shared memory.
template <class Traits>
struct PrefillFp8Compute : PrefillCompute<Traits> {
  using Base = PrefillCompute<Traits>;
  using Warps = typename Base::Warps;
  using S = typename Base::S;
  using Fp8 = typename Traits::Cache;
  static constexpr int tokens = Base::tokens, steps = tokens / 32;
  // Steps whose probabilities come later; wider accumulators leave no registers.
  static constexpr int later = Traits::head_dim_vo <= 192 ? steps / 2 : 0;
  static constexpr bool has_sums = Base::Shared::sum_bytes > 0;
  static constexpr int sum_tiles = 2048 / tokens;  // that are added up at a time

  using Base::args;
  using Base::first_row;
  using Base::group;
  using Base::lane;
  using Base::params;
  using Base::shared;
  using Base::thread;
  using Base::turn;
  using Base::unit_turn;

  FP_DEVICE PrefillFp8Compute(typename Base::Shared& shared, const AttentionParams& params, const VariantArgs& args)
      : Base(shared, params, args) {}

  FP_DEVICE void run() {
    this->run_units([&](float (&scores)[1][tokens / 8][4]) { attend(scores); });
  }

 private:
  // A unit whose first scores are there; leaves with those of the next one.
  FP_DEVICE void attend(float (&scores)[1][tokens / 8][4]) {
    const TiledPlace& tiled = this->tiled_place();
    const WorkItem& item = tiled.place.item;
    const Unit& unit = tiled.place.unit;
    const float scale = score_scale_of<Traits>(params, unit), softmax_scale = softmax_scale_of<Traits>(scale);
    const bool transforms = transforms_scores<Traits>(params, scale);
    const UnitTokens& tokens_of_unit = tiled.tokens;  // read with each tile: registers are few
    i32 first = tokens_of_unit.first;                 // of the tile
    float values[1][S::value_tiles][4] = {}, factor[1][2];
    float sum_factor[2] = {0.f, 0.f};  // of what was added up: nothing yet
    int left = sum_tiles;              // tiles until the next time
    Fp8Softmax state;
    state.clear();
    const WarpRows warp_rows{params, item, unit, first_row, lane};
    if (params.sinks) {
      begin_with_sinks(state, warp_rows);
      state.lift_sums();
    }
    auto prepare = [&] {
      if (transforms) transform_scores<Traits>(scores, scale, warp_rows, args, first);
      if (Base::masks_all || first < tokens_of_unit.clear_begin || first > tokens_of_unit.clear_end)
        mask_scores<Traits, true>(scores, warp_rows, args, first);
    };
    u32 probabilities[steps][4];
    float exponents[max_of(later, 1) * 4][4];
    prepare();
    state.raise(scores, softmax_scale, factor);
    state.template soften<Fp8, later>(probabilities, exponents, scores, softmax_scale);
    bool keys_there = false, values_there = false;  // seen before they are wanted
#pragma unroll 1
    while ((first += tokens) < tokens_of_unit.end) {
      if (!keys_there) shared.key_ring.wait_full(turn + 1);
      ++turn;
      this->await_turn();
      this->template issue_scores<typename Traits::KeyProduct>(scores[0], turn);
      this->await_values(turn - 1, values_there);  // a branch: exponentials stay behind the products' issue
      if constexpr (later > 0) ptx::wgmma_settle(exponents);
      state.template soften_later<Fp8, later>(probabilities, exponents);
      issue_values(values[0], probabilities, turn - 1, true);
      values_there = shared.value_ring.is_full(turn);
      keys_there = shared.key_ring.is_full(turn + 1);
      ptx::wgmma_wait<1>();
      ptx::wgmma_settle(scores[0]);
      this->release_tile(shared.key_ring, turn);
      prepare();
      const bool outgrown = state.raise(scores, softmax_scale, factor);
      ptx::wgmma_wait<0>();
      ptx::wgmma_settle(values[0]);
      this->release(shared.value_ring, turn - 1);
      if (outgrown) {
        state.rescale(values, factor);
        sum_factor[0] *= factor[0][0];
        sum_factor[1] *= factor[0][1];
      }
      if (has_sums && --left == 0) {
        left = sum_tiles;
        add_sums(values[0], sum_factor);
        keep_sums(values[0], sum_factor);
      }
      state.template soften<Fp8, later>(probabilities, exponents, scores, softmax_scale);
    }
    state.template soften_later<Fp8, later>(probabilities, exponents);
    this->await_values(turn, values_there);
    ++unit_turn;
    if constexpr (Base::joined) {
      ++turn;
      this->await_first_keys();
      this->await_turn();
      issue_values(values[0], probabilities, turn - 1, false);
      this->template issue_scores<typename Traits::KeyProduct>(scores[0], turn);
    } else {
      this->await_turn();
      issue_values(values[0], probabilities, turn++, false);
    }
    this->pass_turn();
    ptx::wgmma_wait<Base::joined ? 1 : 0>();
    ptx::wgmma_settle(values[0]);
    this->release(shared.value_ring, turn - 1);
    if constexpr (has_sums) add_sums(values[0], sum_factor);
    state.lower_maxima();
    this->write(state, values[0], tiled.place, has_sums ? shared.sums : this->query_tile(unit_turn - 1));
    if (thread == 0) stamp<Traits>(params, Stamp::written);
    __syncwarp();
    this->release(shared.place_ring, unit_turn - 1);
    if constexpr (Base::joined) {
      this->finish_first_scores(scores[0]);
    } else {
      this->first_scores(scores[0]);
    }
  }

  // values += P V. `pass`: the turn, shortly before the last step, so that the next group's products follow at once.
  FP_DEVICE void issue_values(float (&values)[S::value_tiles][4], const u32 (&probabilities)[steps][4], u32 turn,
                              bool pass) const {
    using Values = typename Base::Values;
    const ptx::Matrix tile(ptx::shared_address(shared.values[shared.value_ring.slot(turn)]), 0);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < steps; ++step) {
      if (pass && step == max_of(0, steps - 2)) this->pass_turn();
      Traits::ValueProduct::multiply(values, probabilities[step],
                                     tile.at(step / 4 * Values::block_bytes + step % 4 * 32), true);
    }
    ptx::wgmma_commit();
  }

  // Of tile n of the thread's values: among those of its group, where the group's output will be.
  FP_DEVICE u32 sum_address(int n) const {
    return ptx::shared_address(shared.sums) + n / 4 * 16384 + group * 8192 + n % 4 * 2048 + thread % 128 * 16;
  }
  FP_DEVICE void add_sums(float (&values)[S::value_tiles][4], const float (&sum_factor)[2]) const {
    if (!__any_sync(0xffffffff, sum_factor[0] != 0.f || sum_factor[1] != 0.f)) return;
#pragma unroll
    for (int n = 0; n < S::value_tiles; ++n) {
      u32 sums[4];
      ptx::load_shared(sums, sum_address(n));
#pragma unroll
      for (int e = 0; e < 4; ++e)
        values[n][e] = fmaf(__int_as_float(static_cast<int>(sums[e])), sum_factor[e / 2], values[n][e]);
    }
  }
  FP_DEVICE void keep_sums(float (&values)[S::value_tiles][4], float (&sum_factor)[2]) const {
    const auto bits = [&](int n, int e) { return static_cast<u32>(__float_as_int(values[n][e])); };
#pragma unroll
    for (int n = 0; n < S::value_tiles; ++n) {
      ptx::store_shared(sum_address(n), bits(n, 0), bits(n, 1), bits(n, 2), bits(n, 3));
#pragma unroll
      for (int e = 0; e < 4; ++e) values[n][e] = 0.f;
    }
    sum_factor[0] = sum_factor[1] = 1.f;
  }
};

}  // namespace flashpage
