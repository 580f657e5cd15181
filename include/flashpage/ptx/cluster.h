// Thread block clusters: CTAs of one GPC that see each other's shared memory, sm_90.
#pragma once
#include "flashpage/common/types.h"

namespace flashpage::ptx {

// This CTA's number in its cluster.
FP_DEVICE u32 cluster_rank() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// All threads of all the cluster's CTAs; what one wrote before, the others see behind it.
FP_DEVICE void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// An mbarrier at the same place in the shared memory of the cluster's CTA `rank`. It says that reads are over and
// releases no writes: with cluster scope each arrival would be a fence of the whole card's memory.
FP_DEVICE void mbarrier_arrive_at(u32 barrier, u32 rank) {
  asm volatile(
      "{\n.reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

}  // namespace flashpage::ptx
