// Attention of many packed rows (prefill, appends) on Hopper: its time is the time of the tensor cores' products
// (wgmma).
//
// One CTA an SM, or two if rows are few. One warpgroup loads ahead of the others: K, V and Q by a warp each. The other
// warpgroups compute, 64 rows each, over the same tiles of K and V. A launch of its own merges the partials of cut
// units.
#pragma once
#include "flashpage/kernels/prefill_sm90/compute.h"
#include "flashpage/kernels/prefill_sm90/compute_fp8.h"
#include "flashpage/kernels/prefill_sm90/loaders/loader.h"
#include "flashpage/ptx/cta_memory.h"
#include "flashpage/ptx/griddepcontrol.h"
#include "flashpage/ptx/prefetch.h"
#include "flashpage/ptx/registers.h"

namespace flashpage {

template <class Given>
struct PrefillSm90 {
  using Traits = typename PrefillStages<Given>::Traits;
  using Shared = PrefillShared<Traits>;
  using Warps = PrefillWarps<Traits>;
  using Compute = typename select_type<Warps::multiplies_fp8, PrefillFp8Compute<Traits>, PrefillCompute<Traits>>::type;
  static constexpr int threads = Warps::threads;
  static constexpr int ctas_per_sm = Traits::ctas_per_sm, cluster_rows = 0;
  static constexpr int shared_bytes = sizeof(Shared);
  static_assert(shared_bytes <= Shared::most_bytes, "more than a CTA has on Hopper");

  FP_DEVICE static void run(const AttentionParams& params, const VariantArgs& args, const KvMaps& maps,
                            const MaskTilesParams& mask_tiles) {
    Shared& shared = ptx::cta_memory<Shared>();
    // The L2 also holds what an earlier launch is about to write, so this prefetch need not wait for that launch.
    if (threadIdx.x == 32) ptx::prefetch_to_l2(&cta_start(params.plan, blockIdx.x / Traits::ctas));
    if (threadIdx.x == 0) {
      init_barriers(shared);
      if (Warps::by_boxes) {
        ptx::prefetch_tensor_map(maps.k);
        ptx::prefetch_tensor_map(maps.v);
      }
      if (params.query_box_rows > 0) ptx::prefetch_tensor_map(maps.q);
      if (Shared::leaves_by_boxes && params.out_box_rows > 0) ptx::prefetch_tensor_map(maps.out);
    }
    if constexpr (Warps::rotates) shared.rotation.steps.fill(params, threadIdx.x, threads);
    clear_padding(shared, params.cta_rows);
    if constexpr (Traits::ctas == 1) {
      __syncthreads();
    } else {
      ptx::cluster_barrier();  // the other CTA's barriers are initialised too
    }
    ptx::grid_dependency_wait();
    if (threadIdx.x < Warps::loading * 32) {
      ptx::give_registers_back<Warps::loading_registers>();
      PrefillLoader<Traits>(shared, params, maps, mask_tiles).run();
      ptx::grid_dependency_launch();
    } else {
      ptx::take_registers<Warps::computing_registers>();
      Compute(shared, params, args).run();
    }
    if constexpr (Traits::ctas > 1) ptx::cluster_barrier();  // the other CTA may still arrive at barriers here
  }

 private:
  // Called by one thread.
  FP_DEVICE static void init_barriers(Shared& shared) {
    shared.key_ring.init(Warps::key_arrivals, Warps::computing * Traits::ctas);
    shared.value_ring.init(Warps::value_arrivals, Warps::computing * (Warps::transposes ? 1 : Traits::ctas));
    shared.place_ring.init(1, Warps::place_readers);
    shared.query_ring.init(Warps::query_arrivals, Warps::computing);
    if constexpr (Warps::transposes) shared.staged_ring.init(1, Warps::transposing * Traits::ctas);
    shared.rotation.init();
    for (u64& edge : shared.edge) ptx::mbarrier_init(ptx::shared_address(&edge), 1);
    if constexpr (Warps::converts) {
      for (auto& barriers : shared.staged_barriers) Shared::Tiles::init(barriers);
    }
    ptx::mbarrier_init_fence();
  }

  // Zeros the padding that copies never write and Q K^T reads.
  FP_DEVICE static void clear_padding(Shared& shared, i32 cta_rows) {
    using S = typename Shared::S;
    for (int i = 0; i < Shared::queries; ++i)
      zero_padding<typename S::Query, Traits::head_dim_qk, typename Shared::QueryRows>(shared.query[i], Traits::tile_q,
                                                                                       threadIdx.x, threads);
    clear_unused_rows(shared, cta_rows);
    if constexpr (!Warps::by_boxes) {
      for (int i = 0; i < Shared::key_stages; ++i)
        zero_padding<typename S::Cache, Traits::head_dim_qk, typename Shared::Keys>(shared.keys[i], Shared::tokens,
                                                                                    threadIdx.x, threads);
    }
    ptx::fence_before_products();
  }
  // Zeros the rows of Q that no unit has, because units have only whole rows of the group, and that boxes do not bring.
  // Later they hold output that is never stored.
  FP_DEVICE static void clear_unused_rows(Shared& shared, i32 cta_rows) {
    using Rows = typename Shared::QueryRows;
    const i32 chunks = (Traits::tile_q - cta_rows) * (Rows::stride / 16);
    for (i32 i = threadIdx.x; i < chunks * Rows::panels * Shared::queries; i += threads) {
      const i32 panel = i / chunks, chunk = i % chunks;
      u8* rows =
          shared.query[panel / Rows::panels] + panel % Rows::panels * Rows::panel_bytes + cta_rows * Rows::stride;
      reinterpret_cast<uint4*>(rows)[chunk] = uint4{};
    }
  }
};

}  // namespace flashpage
