// Barriers at which fibers wait.
#pragma once
#include "flashpage/ptx/cp_async.h"
#include "hopper.h"

namespace flashpage::ptx {

inline void mbarrier_init(u32 barrier, u32 arrivals) { hopper::barriers[barrier] = {static_cast<int>(arrivals)}; }
inline void mbarrier_init_fence() {}
inline void mbarrier_arrive_expect(u32 barrier, u32 bytes) {
  hopper::Barrier& here = hopper::barriers.at(barrier);
  ++here.arrived;
  here.bytes += bytes;
  here.settle();
  card::idle_switches = 0;
}
inline void mbarrier_arrive(u32 barrier) { mbarrier_arrive_expect(barrier, 0); }
inline void mbarrier_arrive_after_copies(u32 barrier) {
  hopper::row_copies[card::fiber].land(0);  // forgets those that have landed
  hopper::copies.push_back([barrier, copies = hopper::row_copies[card::fiber].copies] {
    for (const auto& copy : copies) copy->land();
    mbarrier_arrive(barrier);
  });
}
inline bool mbarrier_test(u32 barrier, u32 parity) { return (hopper::barriers.at(barrier).phase & 1) != parity; }
inline void mbarrier_wait(u32 barrier, u32 parity) {
  card::wait_until([=] { return mbarrier_test(barrier, parity); });
}
inline void mbarrier_wait_for_peers(u32 barrier, u32 parity) { mbarrier_wait(barrier, parity); }

}  // namespace flashpage::ptx
