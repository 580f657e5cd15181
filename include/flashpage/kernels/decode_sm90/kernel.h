// Attention of few packed rows (decode, speculative verify, short appends) on Hopper and Blackwell 10.x: its time is
// the time to read K and V once, at the speed of memory.
//
// One CTA an SM. Four warps load: they go through the plan's units ahead of the other warps and keep a ring of slots
// full across the units' ends. The other warps compute, in teams that alternate on the slots, each with its own softmax
// state; at a unit's end the teams' states are combined through shared memory. The CTA that ends the last piece of a
// cut unit merges its partials. If the CTAs of a cluster have all pieces, they send each other what is to be merged
// instead.
#pragma once
#include "flashpage/kernels/decode_sm90/compute.h"
#include "flashpage/ptx/cta_memory.h"
#include "flashpage/ptx/griddepcontrol.h"
#include "flashpage/ptx/prefetch.h"
#include "flashpage/ptx/registers.h"
#include "flashpage/tile/load/decode_load.h"

namespace flashpage {

template <class Given>
struct DecodeSm90 {
  using Traits = typename DecodeStages<Given>::Traits;
  using Shared = DecodeShared<Traits>;
  using Warps = DecodeWarps<Traits>;
  static constexpr int threads = Warps::threads;
  static constexpr int ctas_per_sm = 1;
  static constexpr int shared_bytes = sizeof(Shared);
  // Packed rows of a unit that a cluster can merge; 0: the kernel is not launched with clusters.
  static constexpr int cluster_rows = Shared::has_mailbox ? min_of(ClusterMerge<Traits>::max_rows, Traits::tile_q) : 0;
  static_assert(shared_bytes <= cta_shared_bytes(ctas_per_sm), "the fewest slots are more than a CTA has");
  // A loading warp returns to the ring after `loading` slots. In a shorter ring it would wait for the phase after the
  // one that other warps still fill, and the parity of a phase cannot tell those apart.
  static_assert(Traits::stages >= Warps::loading);

  FP_DEVICE static void run(const AttentionParams& params, const VariantArgs& args, const KvMaps& maps) {
    Shared& shared = ptx::cta_memory<Shared>();
    DecodeLoad<Traits, Shared> load(shared, params, maps);
    const bool loads = threadIdx.x < Warps::loading * 32;
    if (loads) {
      ptx::grid_dependency_wait();
      load.load_plan_words();  // before the barriers are initialised, because loading the plan takes long
    } else {
      if (threadIdx.x == Warps::loading * 32) begin(shared, maps);
      prefetch_indices(params);
    }
    clear_padding(shared);
    if constexpr (Shared::has_mailbox) ptx::cluster_arrive();
    __syncthreads();
    if constexpr (Shape<Traits>::rotate) {
      // Fills the table while the first tiles are loaded.
      if (!loads) DecodeCompute<Traits>(shared, params, args).make_rotations();
    }
    if (loads) {
      ptx::give_registers_back<Warps::loading_registers>();
      load.run();
      ptx::grid_dependency_launch();
      if constexpr (Shared::has_mailbox) ptx::cluster_wait();  // after an arrival every thread must wait
    } else {
      ptx::take_registers<Warps::computing_registers>();
      ptx::grid_dependency_wait();
      DecodeCompute<Traits>(shared, params, args).run();
    }
  }

 private:
  // Called by one thread.
  FP_DEVICE static void begin(Shared& shared, const KvMaps& maps) {
    if constexpr (Traits::loader == Loader::boxes) {
      ptx::prefetch_tensor_map(maps.k);
      ptx::prefetch_tensor_map(maps.v);
    }
    shared.ring.init(DecodeLoad<Traits, Shared>::SlotLoader::arrivals, Warps::team);
    shared.place_ring.init(Warps::place_arrivals, 32 * Warps::computing);
    for (u64& cleared : shared.cleared) ptx::mbarrier_init(ptx::shared_address(&cleared), 32 * Warps::team);
    if constexpr (Shared::has_mailbox) shared.mailbox.init();
    ptx::mbarrier_init_fence();
  }

  // All computing warps prefetch the page numbers to the L2 while the plan is loaded, which makes the lookup after it
  // faster. A prefetch reads nothing, so it need not wait for the launch before.
  FP_DEVICE static void prefetch_indices(const AttentionParams& params) {
    if constexpr (Traits::kv_source != KvSource::ragged) {
      constexpr int line = 128 / sizeof(i32), computing = 32 * Warps::computing;
      const int thread = threadIdx.x - 32 * Warps::loading;
      const i64 step = static_cast<i64>(gridDim.x) * computing * line;
      for (i64 i = (static_cast<i64>(thread) * gridDim.x + blockIdx.x) * line; i < params.num_kv_indices; i += step)
        ptx::prefetch_to_l2(params.kv_indices + i);
    }
  }

  // Zeros the padding that copies never write and Q K^T reads.
  FP_DEVICE static void clear_padding(Shared& shared) {
    using S = Shape<Traits>;
    for (int i = 0; i < Shared::places_ahead; ++i)
      zero_padding<typename S::Query, Traits::head_dim_qk>(shared.query[i], Traits::tile_q, threadIdx.x, threads);
    if constexpr (Traits::loader == Loader::rows) {
      for (int i = 0; i < Traits::stages; ++i)
        zero_padding<typename S::Cache, Traits::head_dim_qk, typename S::CacheKeyRows>(shared.slots[i], S::warp_tokens,
                                                                                       threadIdx.x, threads);
    }
  }
};

}  // namespace flashpage
