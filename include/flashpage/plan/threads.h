// Work that several threads share. In a phase each thread runs once; the phase ends with a barrier. Data written in one
// phase may be read by any thread in later ones, but in the same phase only by the thread that wrote it. `any` is a
// phase that also tells all threads whether one of them returned true. Threads have no other connection, so a host may
// run them one by one (csrc/plan/table_planner.cpp), in any order.
#pragma once
#include "flashpage/plan/lengths.h"

namespace flashpage::plan {

inline constexpr i32 num_threads = 256;  // threads of the kernel that plans on a card

inline constexpr i32 warp = 32;

// Calls body(i, member, 8) for every i < count and member < 8: eight threads share the work for one i, as a lane has
// few requests and few CTAs.
inline constexpr i32 group_threads = 8;
template <class Body>
FP_HOST_DEVICE void by_groups(i32 thread, i32 count, Body&& body) {
  constexpr i32 groups = num_threads / group_threads;
  FP_ROLLED
  for (i32 i = thread / group_threads; i < count; i += groups) body(i, thread % group_threads, group_threads);
}

// A Partitioner's searcher that looks at 32 requests at a time. Vote::count(holds) returns, to every thread of the
// warp, for how many lanes holds(lane) is true. Apart from that, each thread does what one thread alone would.
template <class Vote>
struct WarpSearcher {
  Vote vote;

  FP_HOST_DEVICE i32 request_at(const Request* requests, i32 batch, i32 from, double cost) const {
    const i32 near = advance(requests, batch, from, 1, cost);
    if (near < from + warp) return near;
    i32 low = near;  // continues in strides
    while (true) {
      const i32 next = advance(requests, batch, low, warp, cost);
      if (next < low + warp * warp) return advance(requests, batch, next, 1, cost);
      low = next;
    }
  }
  FP_HOST_DEVICE bool writes() const { return vote.leads(); }
  FP_HOST_DEVICE void meet() const { vote.meet(); }

 private:
  // The last of `from` and 32 other requests, `stride` apart, that begins at or before `cost`.
  FP_HOST_DEVICE i32 advance(const Request* requests, i32 batch, i32 from, i32 stride, double cost) const {
    return from + stride * vote.count([&](i32 lane) {
      const i32 mine = from + (lane + 1) * stride;
      return mine < batch && requests[mine].cost <= cost;
    });
  }
};

// Threads of a host that plans with one.
struct OneThread {
  static constexpr i32 count = 1;

  template <class Body>
  FP_HOST_DEVICE void phase(Body&& body) const {
    body(0);
  }
};

// Calls body(i) for every i < count; ends with a barrier.
template <class Threads, class Body>
FP_HOST_DEVICE void each(const Threads& threads, i32 count, Body&& body) {
  threads.phase([&](i32 thread) {
    FP_ROLLED
    for (i32 i = thread; i < count; i += Threads::count) body(i);
  });
}

// Calls store(i, sum of load(j) over j < i) for every i < count and returns the address of the total. Addition must be
// associative; the order of the terms is kept. `sums`: [2 * num_threads].
template <class Threads, class T, class Load, class Store>
FP_HOST_DEVICE const T* exclusive_scan(Threads& threads, i32 count, T* sums, Load&& load, Store&& store) {
  constexpr i32 few = 16;  // sums that one thread adds up
  static_assert(few * few == num_threads);
  const i32 each = ceil_div(count, num_threads), summing = each > 0 ? ceil_div(count, each) : 1;
  T* const mine = sums;                  // of each thread
  T* const before = sums + num_threads;  // up to each thread, of the threads in its set of `few`
  threads.phase([&](i32 thread) {
    if (thread >= summing) return;
    T sum{};
    FP_ROLLED
    for (i32 i = thread * each; i < min_of(count, (thread + 1) * each); ++i) sum = sum + load(i);
    mine[thread] = sum;
  });
  threads.phase([&](i32 thread) {
    if (thread >= summing) return;
    T sum = mine[thread / few * few];
    for (i32 i = thread / few * few + 1; i <= thread; ++i) sum = sum + mine[i];
    before[thread] = sum;
  });
  threads.phase([&](i32 thread) {
    if (thread >= summing) return;
    T sum{};
    for (i32 set = 0; set < thread / few; ++set) sum = sum + before[set * few + few - 1];
    if (thread % few > 0) sum = sum + before[thread - 1];
    FP_ROLLED
    for (i32 i = thread * each; i < min_of(count, (thread + 1) * each); ++i) {
      const T term = load(i);
      store(i, sum);
      sum = sum + term;
    }
    if (thread + 1 == summing) mine[0] = sum;
  });
  return mine;
}

}  // namespace flashpage::plan
