// Attention of many packed rows over latent rows (MLA) on Hopper: its time is the time of the tensor cores' products.
//
// A CTA computes the scores and probabilities of 64 packed rows in one warpgroup. Two others sum values, which take
// half of an SM's registers. While values of a block are multiplied, the probabilities of the next one are computed. In
// a pair of CTAs the products of a block's values begin when the next block's scores are almost complete.
//
// More than 64 rows are a pair of CTAs if the copy engine loads boxes of tokens (load.h). The CTAs pass their
// probabilities to each other, and each sums half of the value columns for the rows of both. So it needs half of a
// block's columns for scores alone, and has memory for three blocks of the other half, whose loads have the time of a
// whole block. Two pairs may share a unit of 256 rows: they read its tokens at the same time, and mostly from the L2.
// Single rows (rows.h) are loaded by CTAs without a partner, in units of 64 rows.
#pragma once
#include "flashpage/kernels/fitting_stages.h"
#include "flashpage/kernels/latent_wide_sm90/load.h"
#include "flashpage/kernels/latent_wide_sm90/scores.h"
#include "flashpage/kernels/latent_wide_sm90/values.h"
#include "flashpage/ptx/cta_memory.h"
#include "flashpage/ptx/griddepcontrol.h"
#include "flashpage/ptx/prefetch.h"
#include "flashpage/ptx/registers.h"

namespace flashpage {

template <class Traits>
struct LatentWideSm90 {
  using Shared = WideShared<Traits>;
  using Roles = WideRoles;
  static constexpr int threads = Roles::threads;
  static constexpr int ctas_per_sm = 1, cluster_rows = 0;
  static constexpr int shared_bytes = sizeof(Shared);
  static_assert(shared_bytes <= cta_shared_bytes(ctas_per_sm), "more than a CTA has on Hopper");

  FP_DEVICE static void run(const AttentionParams& params, const VariantArgs&, const KvMaps& maps) {
    Shared& shared = ptx::cta_memory<Shared>();
    // The L2 also holds what an earlier launch is about to write, so this prefetch need not wait for that launch.
    if (threadIdx.x == 32) ptx::prefetch_to_l2(&cta_start(params.plan, blockIdx.x / Traits::ctas));
    if (threadIdx.x == 0) {
      shared.init();
      if (params.query_box_rows > 0) ptx::prefetch_tensor_map(maps.q);
      if constexpr (Shared::has_boxes) ptx::prefetch_tensor_map(maps.k);
      if constexpr (Shared::has_boxes && Shared::tail_panels > 0) ptx::prefetch_tensor_map(maps.v);
    }
    synchronise();  // the other CTA's barriers are initialised too
    ptx::grid_dependency_wait();
    const int warp = threadIdx.x / 32;
    if (warp < Roles::first_scoring) {
      ptx::change_registers<Roles::first_registers, Shared::loading_registers>();
      WideLoad<Traits>(shared, params, maps).run();
      ptx::grid_dependency_launch();
    } else if (warp < Roles::first_of_values) {
      ptx::change_registers<Roles::first_registers, Shared::scoring_registers>();
      WideScores<Traits>(shared, params).run();
    } else {
      ptx::change_registers<Roles::first_registers, Shared::value_registers>();
      WideValues<Traits>(shared, params).run();
    }
    if constexpr (Shared::is_cluster) ptx::cluster_barrier();  // the other CTA may still write here, or read from here
  }

 private:
  FP_DEVICE static void synchronise() {
    if constexpr (Shared::is_cluster) {
      ptx::cluster_barrier();
    } else {
      __syncthreads();
    }
  }
};

}  // namespace flashpage
