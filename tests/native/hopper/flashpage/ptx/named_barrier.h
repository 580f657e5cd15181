// bar.sync and bar.arrive for fibers.
#pragma once
#include "hopper.h"

namespace hopper {

inline std::array<card::Meeting, 32> meetings;  // 16 for each CTA of a pair
inline std::array<bool, 32> votes, last_votes;  // of the present generation, and of the one before

// The barrier with this name of the running thread's CTA.
inline int meeting_of(int name) { return static_cast<int>(card::cta_rank()) * 16 + name; }

}  // namespace hopper

namespace flashpage::ptx {

inline void named_barrier_arrive(int name, int threads) {
  card::Meeting& here = hopper::meetings[hopper::meeting_of(name)];
  card::idle_switches = 0;
  if (static_cast<int>(++here.arrived) < threads) return;
  here.arrived = 0;
  ++here.generation;
}
inline bool named_barrier_or(int name, int threads, bool vote) {
  const int at = hopper::meeting_of(name);
  card::Meeting& here = hopper::meetings[at];
  const unsigned generation = here.generation;
  hopper::votes[at] = hopper::votes[at] || vote;
  if (static_cast<int>(here.arrived) + 1 == threads) {
    hopper::last_votes[at] = hopper::votes[at];
    hopper::votes[at] = false;
  }
  named_barrier_arrive(name, threads);
  card::wait_until([=] { return hopper::meetings[at].generation != generation; });
  return hopper::last_votes[at];  // no fiber can be two meetings ahead
}
inline void named_barrier(int name, int threads) {
  const int at = hopper::meeting_of(name);
  const unsigned generation = hopper::meetings[at].generation;
  named_barrier_arrive(name, threads);
  card::wait_until([=] { return hopper::meetings[at].generation != generation; });
}

}  // namespace flashpage::ptx
