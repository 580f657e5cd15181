// The shared memory of a cluster's CTAs side by side in that of fibers, hopper::cta_bytes each.
#pragma once
#include "hopper.h"

namespace hopper {

inline u32 cta_bytes = sizeof memory;

}  // namespace hopper

namespace flashpage::ptx {

inline void cluster_arrive() {}
inline void cluster_wait() {}
inline u32 peer_address(u32 address, u32 rank) { return address % hopper::cta_bytes + rank * hopper::cta_bytes; }

}  // namespace flashpage::ptx
