// Attention over latent rows (MLA) in e4m3 on Hopper, which shared memory holds as they are stored.
//
// Scores are products of e4m3: Q is a sum of two such numbers (query.h), and the products of 128 columns are multiplied
// by the scale of these columns. Values are multiplied in fp16: the warps that sum them convert V on its way to
// registers (values.h). fp16 holds e4m3 exactly. A token's scale is divided by a power of two, so that fp16 has room
// for it, and rounded; probabilities are multiplied by that power.
//
// A CTA has 16, 32 or 64 packed rows. One warpgroup computes scores and probabilities: of 64, packed rows are the rows
// of its products (scores.h), of fewer, tokens are (token_scores.h). Two others hold the sums of values, which for 64
// rows of 512 columns take half of an SM's registers. One warp goes through the plan and loads Q, two load rows, and
// one arranges scales (load.h).
#pragma once
#include "flashpage/kernels/latent_e4m3_sm90/load.h"
#include "flashpage/kernels/latent_e4m3_sm90/scores.h"
#include "flashpage/kernels/latent_e4m3_sm90/token_scores.h"
#include "flashpage/kernels/latent_e4m3_sm90/values.h"
#include "flashpage/ptx/cta_memory.h"
#include "flashpage/ptx/griddepcontrol.h"
#include "flashpage/ptx/prefetch.h"
#include "flashpage/ptx/registers.h"

namespace flashpage {

template <class Traits>
struct LatentE4m3Sm90 {
  using Shared = E4m3Shared<Traits>;
  using Roles = WideRoles;
  using Scores = typename select_type<(Shared::rows < 64), E4m3TokenScores<Traits>, E4m3Scores<Traits>>::type;
  static constexpr int threads = Roles::threads;
  static constexpr int ctas_per_sm = 1, cluster_rows = 0;
  static constexpr int shared_bytes = sizeof(Shared);
  static_assert(shared_bytes <= cta_shared_bytes(ctas_per_sm), "more than a CTA has on Hopper");

  FP_DEVICE static void run(const AttentionParams& params, const VariantArgs&, const KvMaps& maps) {
    Shared& shared = ptx::cta_memory<Shared>();
    // The L2 also holds what an earlier launch is about to write, so this prefetch need not wait for that launch.
    if (threadIdx.x == 32) ptx::prefetch_to_l2(&cta_start(params.plan, blockIdx.x));
    if (threadIdx.x == 0) {
      shared.init();
      if (params.query_box_rows > 0) ptx::prefetch_tensor_map(maps.q);
      if constexpr (Shared::has_boxes) ptx::prefetch_tensor_map(maps.k);
      if constexpr (Shared::has_boxes && Shared::tail_panels > 0) ptx::prefetch_tensor_map(maps.v);
    }
    __syncthreads();
    ptx::grid_dependency_wait();
    const int warp = static_cast<int>(threadIdx.x / 32);
    if (warp < Roles::first_scoring) {
      ptx::change_registers<Roles::first_registers, Shared::loading_registers>();
      E4m3Load<Traits>::run(shared, params, maps);
      ptx::grid_dependency_launch();
    } else if (warp < Roles::first_of_values) {
      ptx::change_registers<Roles::first_registers, Shared::scoring_registers>();
      Scores(shared, params).run();
    } else {
      ptx::change_registers<Roles::first_registers, Shared::value_registers>();
      E4m3Values<Traits>(shared, params).run();
    }
  }
};

}  // namespace flashpage
