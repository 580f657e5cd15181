// cp.async.bulk between the CTAs of a cluster, sm_90.
#pragma once
#include "flashpage/common/types.h"

namespace flashpage::ptx {

// From this CTA's shared memory to another's (`to` and `barrier`: peer_address), whose barrier counts the bytes. All
// are multiples of 16. By one thread, behind fence_before_bulk_copies of those who wrote it.
FP_DEVICE void bulk_copy_to_peer(u32 to, u32 from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "r"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

}  // namespace flashpage::ptx
