// Attention of more than 64 packed rows over latent rows (MLA) on Hopper, by pairs of CTAs that load tokens for each
// other: its time is the time of the tensor cores' products.
//
// A CTA has 64 packed rows, whose values take half of an SM's registers: each of two computing warpgroups has half of
// the value columns. Blocks of 64 tokens come in pairs. One warpgroup computes the probabilities of the first block,
// the other one those of the second, and each multiplies both blocks' probabilities with its half of the values. So one
// warpgroup's exponentials run while the other's products do. The four loading warps refill a part of a block's columns
// as soon as its last product has read it. CTAs are pairs with 128 packed rows, and each loads half of the tokens for
// both. Two pairs may share a unit of 256 rows: they read its tokens at the same time, and mostly from the L2.
#pragma once
#include "flashpage/kernels/latent_wide_sm90/compute.h"
#include "flashpage/kernels/latent_wide_sm90/load.h"
#include "flashpage/ptx/cta_memory.h"
#include "flashpage/ptx/griddepcontrol.h"
#include "flashpage/ptx/prefetch.h"
#include "flashpage/ptx/registers.h"

namespace flashpage {

template <class Traits>
struct LatentWideSm90 {
  using Shared = WideShared<Traits>;
  using Warps = WideWarps;
  static constexpr int threads = Warps::threads;
  static constexpr int ctas_per_sm = 1, cluster_rows = 0;
  static constexpr int shared_bytes = sizeof(Shared);
  static_assert(shared_bytes <= cta_shared_bytes(ctas_per_sm), "more than a CTA has on Hopper");

  FP_DEVICE static void run(const AttentionParams& params, const VariantArgs&, const KvMaps& maps) {
    Shared& shared = ptx::cta_memory<Shared>();
    // The L2 also holds what an earlier launch is about to write, so this prefetch need not wait for that launch.
    if (threadIdx.x == 32) ptx::prefetch_to_l2(&cta_start(params.plan, blockIdx.x / Traits::ctas));
    if (threadIdx.x == 0) {
      shared.init();
      ptx::prefetch_tensor_map(maps.k);
      if (params.query_box_rows > 0) ptx::prefetch_tensor_map(maps.q);
      if constexpr (Shared::tail_panels > 0) ptx::prefetch_tensor_map(maps.v);
    }
    ptx::cluster_barrier();  // the other CTA's barriers are initialised too
    ptx::grid_dependency_wait();
    if (threadIdx.x < Warps::loading * 32) {
      ptx::give_registers_back<Warps::loading_registers>();
      WideLoad<Traits>(shared, params, maps).run();
      ptx::grid_dependency_launch();
    } else {
      ptx::take_registers<Warps::computing_registers>();
      WideCompute<Traits>(shared, params).run();
    }
    ptx::cluster_barrier();  // the other CTA may still arrive at barriers here
  }
};

}  // namespace flashpage
