// The merge of a cut unit in latent_decode_sm90, inside the launch: by the CTA of its last piece, or by all CTAs of a
// cluster that has its pieces.
#pragma once
#include "flashpage/kernels/latent_decode_sm90/shared.h"
#include "flashpage/ptx/cluster.h"
#include "flashpage/tile/merge/arrival_merge.h"

namespace flashpage {

// Made of a unit's place, and used after the place is released: the other warps of a CTA must end before a cluster's
// barrier lets it pass, and the publishing warp waits for a free place before it ends.
template <class Traits>
struct LatentMerge {
  using Shared = LatentShared<Traits>;
  static constexpr int warps = LatentWarps<Traits>::computing, threads = 32 * warps;
  static constexpr int barrier = 1;  // name

  const MergeItem* item;
  u32* arrivals;
  i32 piece;
  bool is_piece, in_cluster;

  FP_DEVICE explicit LatentMerge(const SlottedPlace& place)
      : item(place.merge),
        arrivals(place.arrivals),
        piece(place.place.item.piece),
        is_piece(place.place.item.partial_row >= 0),
        in_cluster(place.in_cluster) {}

  // Whether all other pieces are done. Called by one thread before the unit ends; most units' other pieces are, because
  // CTAs end with a request that others began, and then the counter need not be raised.
  FP_DEVICE bool others_are_done() const {
    if (!is_piece || in_cluster) return false;
    return ptx::load_acquire(arrivals) == static_cast<u32>(__ldg(&item->num_partials)) - 1;
  }

  // Called by all computing threads, after they have written the piece's rows.
  FP_DEVICE void run(Shared& shared, const AttentionParams& params, int thread, bool others_were_done) const {
    if (!is_piece) return;
    const MergeItem merge = *item;
    const ArrivalMerge<Traits, warps> all{params, merge, thread % 32};
    if (in_cluster) {
      ptx::cluster_barrier();
      return all.run_share(thread / 32, piece, merge.num_partials);
    }
    ptx::named_barrier(barrier, threads);
    if (thread == 0) {
      if (others_were_done) *arrivals = 0;
      shared.is_last_piece = others_were_done || is_last_arrival(arrivals, merge.num_partials);
    }
    ptx::named_barrier(barrier, threads);
    if (!shared.is_last_piece) return;
    all.run(shared.merge_sums(), thread / 32);
    ptx::named_barrier(barrier, threads);  // the sums are the exchange of the next unit's scores
  }
};

}  // namespace flashpage
