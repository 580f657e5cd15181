// The CTAs of a cluster have consecutive parts of the fibers' shared memory, hopper::cta_bytes each. Kernels that are
// compiled for clusters run only on a card (tests/support/cases/long.py).
#pragma once
#include "hopper.h"

namespace hopper {

inline u32 cta_bytes = sizeof memory;

}  // namespace hopper

namespace flashpage::ptx {

inline u32 cluster_rank() { return 0; }
inline void cluster_barrier() { __syncthreads(); }
inline void cluster_arrive() {}
inline void cluster_wait() {}
inline u32 peer_address(u32 address, u32 rank) { return address % hopper::cta_bytes + rank * hopper::cta_bytes; }
inline void mbarrier_arrive_at(u32, u32) { hopper::stop("no other CTA is there"); }

}  // namespace flashpage::ptx
