// A ring of shared-memory slots between loading and computing warps: two barriers for each slot. `use` counts the uses
// of the ring from 0 on both sides; it gives the slot and the phase of its barriers.
#pragma once
#include "flashpage/ptx/cluster.h"
#include "flashpage/ptx/mbarrier.h"
#include "flashpage/ptx/shared.h"

namespace flashpage {

template <int slots>
struct SlotRing {
  u64 full[slots];
  u64 empty[slots];

  // Called by one thread, before mbarrier_init_fence and a CTA barrier. One thread initialises all barriers: it is not
  // slower, and racecheck reports false hazards otherwise.
  FP_DEVICE void init(int producers, int consumers) {
    for (u64& barrier : full) ptx::mbarrier_init(ptx::shared_address(&barrier), producers);
    for (u64& barrier : empty) ptx::mbarrier_init(ptx::shared_address(&barrier), consumers);
  }

  FP_DEVICE static u32 slot(u32 use) { return use % slots; }
  FP_DEVICE u32 full_barrier(u32 use) const { return ptx::shared_address(&full[slot(use)]); }
  FP_DEVICE void wait_full(u32 use) const { ptx::mbarrier_wait(full_barrier(use), use / slots & 1); }
  // is_full tests without waiting, so that other work fits between the test and wait_full.
  FP_DEVICE bool is_full(u32 use) const { return ptx::mbarrier_test(full_barrier(use), use / slots & 1); }
  FP_DEVICE void wait_empty(u32 use) const {
    ptx::mbarrier_wait(ptx::shared_address(&empty[slot(use)]), (use / slots & 1) ^ 1);
  }
  FP_DEVICE bool is_empty(u32 use) const {
    return ptx::mbarrier_test(ptx::shared_address(&empty[slot(use)]), (use / slots & 1) ^ 1);
  }
  FP_DEVICE void release(u32 use) const { ptx::mbarrier_arrive(ptx::shared_address(&empty[slot(use)])); }
  // Releases the slot to the loading warps of the cluster's CTA `rank`.
  FP_DEVICE void release_to(u32 use, u32 rank) const {
    ptx::mbarrier_arrive_at(ptx::shared_address(&empty[slot(use)]), rank);
  }
};

}  // namespace flashpage
