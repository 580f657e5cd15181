// bar.sync and bar.arrive for fibers.
#pragma once
#include "hopper.h"

namespace hopper {

inline std::array<card::Meeting, 16> meetings;

}  // namespace hopper

namespace flashpage::ptx {

inline void named_barrier_arrive(int name, int threads) {
  card::Meeting& here = hopper::meetings[name];
  card::idle_switches = 0;
  if (static_cast<int>(++here.arrived) < threads) return;
  here.arrived = 0;
  ++here.generation;
}
inline void named_barrier(int name, int threads) {
  const unsigned generation = hopper::meetings[name].generation;
  named_barrier_arrive(name, threads);
  card::wait_until([=] { return hopper::meetings[name].generation != generation; });
}

}  // namespace flashpage::ptx
