// Thread block clusters: CTAs that run at the same time and write to each other's shared memory, sm_90. Without a
// cluster attribute at launch, every cluster has one CTA.
#pragma once
#include "flashpage/common/types.h"

namespace flashpage::ptx {

// This CTA's rank in its cluster.
FP_DEVICE u32 cluster_rank() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// This CTA's rank among `ctas` consecutive ones of the grid, a multiple of its cluster's.
template <int ctas>
FP_DEVICE u32 rank_among() {
  u32 index;
  asm("mov.u32 %0, %%ctaid.x;" : "=r"(index));
  return index % ctas;
}

// A barrier of all threads of the cluster's CTAs: what a thread wrote before it, the others see after it.
FP_DEVICE void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

FP_DEVICE bool is_alone_in_cluster() {
  u32 ctas;
  asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(ctas));
  return ctas == 1;
}

// Called once by every thread of every CTA. Threads that wait see the mbarriers that this thread initialised before
// mbarrier_init_fence, and nothing else: a release would wait for memory.
FP_DEVICE void cluster_arrive() {
  if (is_alone_in_cluster()) return;
  __syncwarp();
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

// Waits until all threads of the cluster have arrived or exited; like the arrival, called by whole warps. A CTA that is
// alone does not wait: for it the instruction would be a barrier of all threads, which reach this point at different
// times.
FP_DEVICE void cluster_wait() {
  if (is_alone_in_cluster()) return;
  __syncwarp();
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The address in the shared memory of the cluster's CTA `rank` that corresponds to `address` in this CTA's.
FP_DEVICE u32 peer_address(u32 address, u32 rank) {
  u32 peer;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(peer) : "r"(address), "r"(rank));
  return peer;
}

// Arrives at the mbarrier with this address in the shared memory of CTA `rank`. It signals that reads are over and
// releases no writes: with the cluster's scope, each arrival would be a fence of the whole card's memory.
FP_DEVICE void mbarrier_arrive_at(u32 barrier, u32 rank) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(peer_address(barrier, rank)) : "memory");
}

}  // namespace flashpage::ptx
