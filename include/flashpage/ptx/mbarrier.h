// mbarrier: barriers in shared memory that count arrivals and the bytes of bulk copies, sm_90.
#pragma once
#include "flashpage/common/types.h"

namespace flashpage::ptx {

// Called by one thread; mbarrier_init_fence and a CTA barrier follow before other threads use the barrier.
FP_DEVICE void mbarrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
FP_DEVICE void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

FP_DEVICE void mbarrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and makes the phase also wait for `bytes` of bulk copies.
FP_DEVICE void mbarrier_arrive_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Arrives once this thread's earlier cp.async have landed; it is one of the expected arrivals.
FP_DEVICE void mbarrier_arrive_after_copies(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Whether the phase of this parity is over (the first phase has parity 0). The instruction may wait a while.
FP_DEVICE bool mbarrier_try(u32 barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{\n.reg .pred over;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 over, [%1], %2;\n"
      "selp.u32 %0, 1, 0, over;\n}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done;
}

// As mbarrier_try, but returns at once.
FP_DEVICE bool mbarrier_test(u32 barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{\n.reg .pred over;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 over, [%1], %2;\n"
      "selp.u32 %0, 1, 0, over;\n}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done;
}

// Waits until the phase of this parity is over.
FP_DEVICE void mbarrier_wait(u32 barrier, u32 parity) {
  while (!mbarrier_try(barrier, parity)) continue;
}

// Waits until the phase is over. Ordinary stores by other CTAs of the cluster before their arrivals are visible after
// it.
FP_DEVICE void mbarrier_wait_for_peers(u32 barrier, u32 parity) {
  u32 done;
  do {
    asm volatile(
        "{\n.reg .pred over;\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 over, [%1], %2;\n"
        "selp.u32 %0, 1, 0, over;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  } while (!done);
}

}  // namespace flashpage::ptx
