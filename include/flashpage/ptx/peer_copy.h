// cp.async.bulk from this CTA's shared memory to that of another CTA of the cluster, sm_90.
#pragma once
#include "flashpage/common/types.h"

namespace flashpage::ptx {

// Copies `bytes`, a multiple of 16. `to` and `barrier` come from peer_address (ptx/cluster.h); an mbarrier of that CTA
// counts the bytes. What was written here must have been fenced (fence_before_bulk_copies); products of the other CTA
// need no fence after they have waited.
FP_DEVICE void copy_to_peer(u32 to, u32 from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "r"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

}  // namespace flashpage::ptx
