// The merge of a cut unit in latent_decode_sm90 by the CTAs of a cluster that has its pieces. Other pieces are merged
// by the launch that follows: one CTA would take 0.5 us for each piece of 16 rows of 512 columns.
#pragma once
#include "flashpage/kernels/latent_decode_sm90/shared.h"
#include "flashpage/ptx/cluster.h"
#include "flashpage/tile/merge/arrival_merge.h"

namespace flashpage {

// Made of a unit's place, and used after the place is released: the other warps of a CTA must end before a cluster's
// barrier lets it pass, and the publishing warp waits for a free place before it ends.
template <class Traits>
struct LatentMerge {
  const MergeItem* item;
  i32 piece;
  bool in_cluster;

  FP_DEVICE explicit LatentMerge(const SlottedPlace& place)
      : item(place.merge),
        piece(place.place.item.piece),
        in_cluster(place.place.item.partial_row >= 0 && place.in_cluster) {}

  // Called by all computing threads, after they have written the piece's rows.
  FP_DEVICE void run(const AttentionParams& params, int thread) const {
    if (!in_cluster) return;
    const MergeItem merge = *item;
    ptx::cluster_barrier();
    ArrivalMerge<Traits, LatentWarps<Traits>::computing>{params, merge, thread % 32}.run_share(thread / 32, piece,
                                                                                               merge.num_partials);
  }
};

}  // namespace flashpage
