// bar.sync and bar.arrive for fibers.
#pragma once
#include "hopper.h"

namespace hopper {

inline std::array<card::Meeting, 16> meetings;
inline std::array<bool, 16> votes, last_votes;  // of the present generation, and of the one before

}  // namespace hopper

namespace flashpage::ptx {

inline void named_barrier_arrive(int name, int threads) {
  card::Meeting& here = hopper::meetings[name];
  card::idle_switches = 0;
  if (static_cast<int>(++here.arrived) < threads) return;
  here.arrived = 0;
  ++here.generation;
}
inline bool named_barrier_or(int name, int threads, bool vote) {
  card::Meeting& here = hopper::meetings[name];
  const unsigned generation = here.generation;
  hopper::votes[name] = hopper::votes[name] || vote;
  if (static_cast<int>(here.arrived) + 1 == threads) {
    hopper::last_votes[name] = hopper::votes[name];
    hopper::votes[name] = false;
  }
  named_barrier_arrive(name, threads);
  card::wait_until([=] { return hopper::meetings[name].generation != generation; });
  return hopper::last_votes[name];  // no fiber can be two meetings ahead
}
inline void named_barrier(int name, int threads) {
  const unsigned generation = hopper::meetings[name].generation;
  named_barrier_arrive(name, threads);
  card::wait_until([=] { return hopper::meetings[name].generation != generation; });
}

}  // namespace flashpage::ptx
