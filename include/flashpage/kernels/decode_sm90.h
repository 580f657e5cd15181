// Attention of few packed rows (decode, speculative verify, short appends) on Hopper: reading K and V once, at the
// speed of memory, is all the work.
//
// One CTA an SM. Four warps load: they walk the plan's units ahead of everyone else and keep a ring of slots full
// across the units' ends. The others compute, in teams that take the slots in turn, each with its own softmax state;
// where a unit ends the teams' states are combined through shared memory. The CTA that ends the last piece of a cut
// unit merges its partials; or the CTAs of a cluster, where they have all its pieces, send each other what to merge.
#pragma once
#include "flashpage/kernels/decode_sm90_compute.h"
#include "flashpage/kernels/decode_sm90_load.h"
#include "flashpage/ptx/griddepcontrol.h"
#include "flashpage/ptx/registers.h"

namespace flashpage {

template <class Traits>
struct DecodeSm90 {
  using Shared = DecodeShared<Traits>;
  using Warps = DecodeWarps<Traits>;
  static constexpr int threads = Warps::threads;
  static constexpr int shared_bytes = sizeof(Shared);
  // Packed rows of a unit that a cluster merges, at most; 0: it is not launched with clusters.
  static constexpr int cluster_rows = Shared::has_mailbox ? min_of(ClusterMerge<Traits>::max_rows, Traits::tile_q) : 0;
  static_assert(shared_bytes <= 232448, "more than a CTA has on Hopper: flashpage/tiles.py, sm90_decode_tile");

  FP_DEVICE static void run(const AttentionParams& params, const VariantArgs& args, const KvMaps& maps) {
    extern __shared__ __align__(1024) u8 memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    if (threadIdx.x == 0) {
      init_barriers(shared);
      if (Traits::loader == Loader::boxes) {
        ptx::prefetch_tensor_map(maps.k);
        ptx::prefetch_tensor_map(maps.v);
      }
    }
    clear_padding(shared);
    if constexpr (Shared::has_mailbox) ptx::cluster_arrive();
    __syncthreads();
    if constexpr (Shape<Traits>::rotate) {
      // While the first tiles are on their way.
      if (threadIdx.x >= Warps::loading * 32) DecodeCompute<Traits>(shared, params, args).make_turns();
    }
    ptx::grid_dependency_wait();
    if (threadIdx.x < Warps::loading * 32) {
      ptx::give_registers_back<Warps::loading_registers>();
      DecodeLoad<Traits>(shared, params, maps).run();
      ptx::grid_dependency_launch();
      if constexpr (Shared::has_mailbox) ptx::cluster_wait();  // by everyone who has arrived
    } else {
      ptx::take_registers<Warps::computing_registers>();
      DecodeCompute<Traits>(shared, params, args).run();
    }
  }

 private:
  // By one thread.
  FP_DEVICE static void init_barriers(Shared& shared) {
    shared.ring.init(DecodeLoad<Traits>::SlotLoader::arrivals, Warps::team);
    shared.place_ring.init(Warps::place_arrivals, 32 * Warps::computing);
    for (u64& cleared : shared.cleared) ptx::mbarrier_init(ptx::shared_address(&cleared), 32 * Warps::team);
    if constexpr (Shared::has_mailbox) shared.mailbox.init();
    ptx::mbarrier_init_fence();
  }

  // What copies never write and Q K^T reads.
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
