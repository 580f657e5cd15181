// Thread block clusters: CTAs that run at the same time and write to each other's shared memory, sm_90. A launch that
// asks for none has clusters of one CTA.
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

FP_DEVICE bool is_alone_in_cluster() {
  u32 ctas;
  asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(ctas));
  return ctas == 1;
}

// By every thread of every CTA, once. Those who wait see the mbarriers that it made, behind mbarrier_init_fence, and
// nothing else: a release would wait for memory.
FP_DEVICE void cluster_arrive() {
  if (is_alone_in_cluster()) return;
  __syncwarp();
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

// Until all threads of the cluster have arrived, or have left. By whole warps, like the arrival. A CTA alone does not
// wait: there the instruction is a barrier of all threads, whenever each of them comes to it.
FP_DEVICE void cluster_wait() {
  if (is_alone_in_cluster()) return;
  __syncwarp();
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Where the cluster's CTA `rank` has what lies at `address` of this one's shared memory.
FP_DEVICE u32 peer_address(u32 address, u32 rank) {
  u32 peer;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(peer) : "r"(address), "r"(rank));
  return peer;
}

// At the mbarrier at the same place in the shared memory of CTA `rank`. It says that reads are over and releases no
// writes: with the cluster's scope each arrival would be a fence of the whole card's memory.
FP_DEVICE void mbarrier_arrive_at(u32 barrier, u32 rank) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(peer_address(barrier, rank)) : "memory");
}

}  // namespace flashpage::ptx
