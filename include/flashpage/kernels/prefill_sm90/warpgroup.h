// The steps of a computing warpgroup of prefill_sm90 that are the same for all types: units in sequence, and how one
// unit's end joins the beginning of the next.
#pragma once
#include "flashpage/kernels/prefill_sm90/order.h"
#include "flashpage/kernels/prefill_sm90/output.h"
#include "flashpage/kernels/prefill_sm90/pipeline.h"
#include "flashpage/kernels/prefill_sm90/scores.h"
#include "flashpage/ptx/wgmma.h"
#include "flashpage/tile/softmax/absent_rows.h"
#include "flashpage/tile/softmax/sinks.h"
#include "flashpage/tile/trace.h"

namespace flashpage {

// A group has 64 rows of a unit, a warp 16 of these.
template <class Traits>
struct PrefillWarpgroup {
  using S = Shape<Traits>;
  using Warps = PrefillWarps<Traits>;
  using Shared = PrefillShared<Traits>;
  using Keys = typename Shared::Keys;
  using Values = typename Shared::Values;
  using QueryRows = typename Shared::QueryRows;
  using KeyProduct = typename Traits::KeyProduct;
  static constexpr int tokens = Shared::tokens;
  // If Q of two units fits, a unit's first scores are issued together with the last values of the unit before.
  static constexpr bool joined = Shared::queries > 1;
  using Scores = float[1][tokens / 8][4];
  using Sums = float[1][S::value_tiles][4];

  Shared& shared;
  const AttentionParams& params;
  const VariantArgs& args;
  int thread = threadIdx.x - Warps::loading * 32;
  int lane = threadIdx.x % 32;
  int group = thread / 128;
  Pipeline<Traits> pipeline{shared, params, lane};
  int first_row = thread / 32 * 16 + cta_row();  // first row of the warp, in the unit
  Order<Warps::groups> order{group};

  FP_DEVICE PrefillWarpgroup(Shared& shared, const AttentionParams& params, const VariantArgs& args)
      : shared(shared), params(params), args(args) {}

  // attend(scores): computes a unit whose first scores are ready; on return those of the next unit are.
  FP_DEVICE void run_units(auto&& attend) {
    if (thread == 0) stamp<Traits>(params, Stamp::start);
    order.begin();
    Scores scores;
    first_scores(scores);
    while (!pipeline.is_over()) {
      if (thread == 0) stamp_first<Traits>(params, Stamp::first_tile);
      attend(scores);
    }
    order.end();
    if (thread == 0) {
      stamp<Traits>(params, Stamp::end);
      stamp<Traits>(params, Stamp::sm);
    }
  }

  // Issues the last tile's values, and the next unit's first scores after them.
  FP_DEVICE void multiply_last(Scores& scores, Sums& values, auto&& issue_values) {
    pipeline.wait_values(pipeline.use);
    pipeline.end_unit();
    if constexpr (joined) pipeline.wait_unit();
    order.wait();
    issue_values();
    if constexpr (joined) issue_scores<KeyProduct>(scores[0]);
    order.pass();
    ptx::wgmma_wait<joined ? 1 : 0>();
    ptx::wgmma_settle(values[0]);
    if (thread == 0) stamp<Traits>(params, Stamp::last_tile);
  }
  // Writes the unit's output, then computes the next unit's first scores if they were not issued above.
  FP_DEVICE void end_unit(const TiledPlace& tiled, SoftmaxState<1>& state, Sums& values, u8* tile, Scores& scores) {
    PrefillOutput<Traits>{pipeline, params, first_row, group, lane}.write(state, values[0], tiled.place, tile);
    if (thread == 0) stamp<Traits>(params, Stamp::written);
    pipeline.release_place();
    if constexpr (joined) {
      take_first_scores(scores);
    } else {
      first_scores(scores);
    }
  }

  // Issues scores = Q K^T of the group's rows and one tile, or as many of its tokens as the product has columns.
  template <class Product, int token_tiles>
  FP_DEVICE void issue_scores(float (&scores)[token_tiles][4]) const {
    const ptx::Matrix query(ptx::shared_address(pipeline.query(pipeline.unit_use)) + group * Warps::group_rows * 128,
                            0);
    const ptx::Matrix keys(pipeline.keys(), 0);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < Keys::padded_bytes / 32; ++step) {
      const int panel = step / 4, in_panel = step % 4 * 32;
      Product::multiply(scores, query.at(panel * QueryRows::panel_bytes + in_panel),
                        keys.at(panel * Keys::panel_bytes + in_panel), step > 0);
    }
    ptx::wgmma_commit();
  }

 private:
  // The first row of a unit that belongs to this CTA.
  FP_DEVICE int cta_row() const {
    return Traits::ctas == 1 ? 0 : static_cast<int>(ptx::cluster_rank()) * params.cta_rows;
  }

  FP_DEVICE void first_scores(Scores& scores) {
    pipeline.wait_unit();
    order.wait();
    issue_scores<KeyProduct>(scores[0]);  // the operands are arbitrary if no unit is left
    order.pass();
    take_first_scores(scores);
  }
  FP_DEVICE void take_first_scores(Scores& scores) const {
    ptx::wgmma_wait<0>();
    ptx::wgmma_settle(scores[0]);
    if (!pipeline.is_over()) pipeline.release_keys();
  }
};

}  // namespace flashpage
