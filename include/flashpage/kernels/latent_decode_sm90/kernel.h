// Attention of few packed rows over latent rows (MLA) on Hopper: its time is the time to read the latent rows once.
//
// Products are transposed: S^T = K Q^T has 64 tokens as its rows and the unit's packed rows as its columns, and O^T +=
// V^T P^T has 64 value columns as its rows. So the wide factors K and V^T are read from the slot as they arrived, each
// once, and no row of a product is padding. Two warps load, one publishes the units, and two warpgroups (teams)
// compute; rows in fp8 are converted by one warpgroup more, or two for up to 16 packed rows. Both teams multiply every
// slot together, so that it is free again early: each sums half of the terms of the scores, and has half of the value
// columns. Clusters merge the pieces of a cut unit themselves (merge.h).
#pragma once
#include "flashpage/kernels/latent_decode_sm90/compute.h"
#include "flashpage/kernels/latent_decode_sm90/convert.h"
#include "flashpage/kernels/latent_decode_sm90/load.h"
#include "flashpage/ptx/cta_memory.h"
#include "flashpage/ptx/griddepcontrol.h"
#include "flashpage/ptx/prefetch.h"
#include "flashpage/ptx/registers.h"

namespace flashpage {

template <class Given>
struct LatentDecodeSm90 {
  using Traits = typename LatentStages<Given>::Traits;
  using Shared = LatentShared<Traits>;
  using Warps = LatentWarps<Traits>;
  using Load = LatentLoad<Traits>;
  static constexpr int threads = Warps::threads;
  static constexpr int ctas_per_sm = 1, cluster_rows = Traits::tile_q;
  static constexpr int shared_bytes = sizeof(Shared);
  static_assert(shared_bytes <= cta_shared_bytes(ctas_per_sm));

  FP_DEVICE static void run(const AttentionParams& params, const VariantArgs&, const KvMaps& maps) {
    Shared& shared = ptx::cta_memory<Shared>();
    Load load(shared, params, maps);
    const bool loads = threadIdx.x < Warps::loading * 32;
    if (loads) {
      ptx::grid_dependency_wait();
      load.load_plan_words();  // before the barriers are initialised, because loading the plan takes long
    } else {
      if (threadIdx.x == Warps::loading * 32) begin(shared, maps);
      prefetch_indices(params);
    }
    __syncthreads();
    if (Shared::converts && loads && threadIdx.x >= Warps::first_converter * 32) {
      ptx::change_registers<Warps::first_registers, Warps::converting_registers>();
      if constexpr (Shared::converts) LatentConvert<Traits>(shared, params).run();
    } else if (loads) {
      ptx::give_registers_back<Warps::loading_registers>();
      load.run();
      ptx::grid_dependency_launch();
    } else {
      ptx::take_registers<Warps::computing_registers>();
      ptx::grid_dependency_wait();
      LatentCompute<Traits>(shared, params).run();
    }
  }

 private:
  // Called by one thread.
  FP_DEVICE static void begin(Shared& shared, const KvMaps& maps) {
    if constexpr (Traits::loader == Loader::boxes) {
      ptx::prefetch_tensor_map(maps.k);
      if constexpr (Traits::head_dim_qk > Traits::head_dim_vo) ptx::prefetch_tensor_map(maps.v);
    }
    shared.ring.init(Load::slot_arrivals, Warps::computing);
    if constexpr (Shared::converts) shared.converted_ring.init(1, Warps::converters);
    shared.place_ring.init(Warps::place_arrivals, 32 * Warps::computing);
    ptx::mbarrier_init_fence();
  }

  // Page numbers go to the L2 while the plan is loaded, as in decode_sm90.
  FP_DEVICE static void prefetch_indices(const AttentionParams& params) {
    constexpr int line = 128 / sizeof(i32), computing = 32 * Warps::computing;
    const int thread = threadIdx.x - 32 * Warps::loading;
    const i64 step = static_cast<i64>(gridDim.x) * computing * line;
    for (i64 i = (static_cast<i64>(thread) * gridDim.x + blockIdx.x) * line; i < params.num_kv_indices; i += step)
      ptx::prefetch_to_l2(params.kv_indices + i);
  }
};

}  // namespace flashpage
