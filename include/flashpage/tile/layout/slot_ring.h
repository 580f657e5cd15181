// A ring of shared-memory slots between warps that load and warps that compute: two barriers a slot, and a count of
// slots so far that gives slot and phase.
#pragma once
#include "flashpage/ptx/cluster.h"
#include "flashpage/ptx/mbarrier.h"
#include "flashpage/ptx/shared.h"

namespace flashpage {

template <int slots>
struct SlotRing {
  u64 full[slots];
  u64 empty[slots];

  // By one thread, before mbarrier_init_fence and a CTA barrier. (A slot a thread is no faster, lanes make barriers one
  // after the other; and racecheck takes threads that have none for makers of barriers behind the ring's.)
  FP_DEVICE void init(int producers, int consumers) {
    for (u64& barrier : full) ptx::mbarrier_init(ptx::shared_address(&barrier), producers);
    for (u64& barrier : empty) ptx::mbarrier_init(ptx::shared_address(&barrier), consumers);
  }

  // `turn`: which use of the ring, counted from 0 by everyone alike.
  FP_DEVICE static u32 slot(u32 turn) { return turn % slots; }
  FP_DEVICE u32 full_barrier(u32 turn) const { return ptx::shared_address(&full[slot(turn)]); }
  FP_DEVICE void wait_full(u32 turn) const { ptx::mbarrier_wait(full_barrier(turn), turn / slots & 1); }
  // In two steps, with other work between them: is_full, and wait_full where it was not.
  FP_DEVICE bool is_full(u32 turn) const { return ptx::mbarrier_test(full_barrier(turn), turn / slots & 1); }
  FP_DEVICE void wait_empty(u32 turn) const {
    ptx::mbarrier_wait(ptx::shared_address(&empty[slot(turn)]), (turn / slots & 1) ^ 1);
  }
  FP_DEVICE void release(u32 turn) const { ptx::mbarrier_arrive(ptx::shared_address(&empty[slot(turn)])); }
  // To who loads in the cluster's CTA `rank`.
  FP_DEVICE void release_to(u32 turn, u32 rank) const {
    ptx::mbarrier_arrive_at(ptx::shared_address(&empty[slot(turn)]), rank);
  }
};

}  // namespace flashpage
