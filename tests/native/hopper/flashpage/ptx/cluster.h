// The CTAs of a cluster have consecutive parts of the fibers' shared memory, hopper::cta_bytes each.
#pragma once
#include "flashpage/ptx/mbarrier.h"
#include "hopper.h"

namespace flashpage::ptx {

inline u32 cluster_rank() { return card::cta_rank(); }
template <int ctas>
u32 rank_among() {
  return blockIdx.x % ctas;
}
inline void cluster_barrier() { card::meet(card::cluster); }
inline void cluster_arrive() {}
inline void cluster_wait() {}
inline u32 peer_address(u32 address, u32 rank) { return address % hopper::cta_bytes + rank * hopper::cta_bytes; }
inline void mbarrier_arrive_at(u32 barrier, u32 rank) { mbarrier_arrive(peer_address(barrier, rank)); }

}  // namespace flashpage::ptx
