// The order in which the computing warpgroups of prefill_sm90 issue their products.
#pragma once
#include "flashpage/ptx/named_barrier.h"

namespace flashpage {

// The groups issue in a circle: while one group's products run, the others exponentiate. A group waits at a named
// barrier of its own, at which the group before it arrives.
template <int groups>
struct Order {
  static constexpr int first_barrier = 1, end_of_barriers = first_barrier + groups;  // names
  static constexpr bool has_others = groups > 1;

  int group;

  FP_DEVICE void begin() const {
    if (group == groups - 1) pass();
  }
  FP_DEVICE void wait() const {
    if (has_others) ptx::named_barrier(first_barrier + group, 256);
  }
  FP_DEVICE void pass() const {
    const int next = group + 1 == groups ? 0 : group + 1;
    if (has_others) ptx::named_barrier_arrive(first_barrier + next, 256);
  }
  // Waits for the last arrival, because each arrival at a barrier needs its wait.
  FP_DEVICE void end() const {
    if (has_others && group == 0) ptx::named_barrier(first_barrier, 256);  // by a constant: registers are few
  }
};

}  // namespace flashpage
