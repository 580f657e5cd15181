// One CTA is a cluster of its own: pairs of them run on a card alone (tests/case_long.py).
#pragma once
#include "hopper.h"

namespace flashpage::ptx {

inline u32 cluster_rank() { return 0; }
inline void cluster_barrier() { __syncthreads(); }
inline void mbarrier_arrive_at(u32, u32) { hopper::stop("no other CTA is there"); }

}  // namespace flashpage::ptx
