// Attention over latent rows (MLA) in fp8 on Hopper by pairs of CTAs that split the columns: 33 packed rows or more. A
// second loading warpgroup converts rows (convert.h), which sets the time.
//
// Two CTAs share a unit's packed rows, and each loads its half of the columns of the latent rows, so that every byte
// goes to one SM and several blocks of tokens fit into shared memory. A CTA sums its columns' terms of the scores, and
// the two exchange these sums through distributed shared memory, thread by thread. Both then have the same scores, and
// thus the same probabilities, and each multiplies them with its half of the value columns.
//
// A computing warpgroup has 64 rows, and works without the other one: the products of one run while the other computes
// exponentials. In units of at most 64 rows both have the same rows and take blocks in turn, and their states are
// merged at the unit's end.
#pragma once
#include "flashpage/kernels/latent_columns_sm90/compute.h"
#include "flashpage/kernels/latent_columns_sm90/load.h"
#include "flashpage/ptx/cta_memory.h"
#include "flashpage/ptx/griddepcontrol.h"
#include "flashpage/ptx/prefetch.h"
#include "flashpage/ptx/registers.h"

namespace flashpage {

template <class Given>
struct LatentColumnsSm90 {
  using Traits = typename ColumnsStages<Given>::Traits;
  using Shared = ColumnsShared<Traits>;
  using Warps = ColumnsWarps;
  static constexpr int threads = Warps::threads;
  static constexpr int ctas_per_sm = 1, cluster_rows = 0;
  static constexpr int shared_bytes = sizeof(Shared);
  static_assert(shared_bytes <= cta_shared_bytes(ctas_per_sm), "more than a CTA has on Hopper");

  FP_DEVICE static void run(const AttentionParams& params, const VariantArgs&, const KvMaps&) {
    Shared& shared = ptx::cta_memory<Shared>();
    // The L2 also holds what an earlier launch is about to write, so this prefetch need not wait for that launch.
    if (threadIdx.x == 32) ptx::prefetch_to_l2(&cta_start(params.plan, blockIdx.x / Traits::ctas));
    if (threadIdx.x == 0) shared.init();
    ptx::cluster_barrier();  // the other CTA's barriers are initialised too
    ptx::grid_dependency_wait();
    const bool loads = threadIdx.x < Warps::loading * 32;
    if (loads && threadIdx.x >= Warps::first_converter * 32) {
      ptx::give_registers_back<Shared::converting_registers>();
      ColumnsLoad<Traits>(shared, params).convert_values();
    } else if (loads) {
      ptx::give_registers_back<Shared::loading_registers>();
      ColumnsLoad<Traits>(shared, params).run();
      ptx::grid_dependency_launch();
    } else {
      ptx::take_registers<Shared::computing_registers>();
      ColumnsCompute<Traits>(shared, params).run();
    }
    ptx::cluster_barrier();  // the other CTA may still write to this one's shared memory
  }
};

}  // namespace flashpage
