// Work that several threads share. In a phase each thread runs once; the phase ends with a barrier. Data written in one
// phase may be read by any thread in later ones, but in the same phase only by the thread that wrote it. `any` is a
// phase that also tells all threads whether one of them returned true. Threads have no other connection, so a host may
// run them one by one (csrc/plan/table_planner.cpp), in any order.
#pragma once
#include "flashpage/plan/cost.h"

namespace flashpage::plan {

inline constexpr i32 num_threads = 256;  // threads of the kernel that plans on a card

inline constexpr i32 warp = 32;

// Calls body(i, lane, 32) for every i < count and lane < 32: the threads of a warp share the work for one i.
template <class Body>
FP_HOST_DEVICE void by_warps(i32 thread, i32 count, Body&& body) {
  for (i32 i = thread / warp; i < count; i += num_threads / warp) body(i, thread % warp, warp);
}

// A Partitioner's searcher that looks at 32 requests at a time. Vote::count(holds) returns, to every thread of the
// warp, for how many lanes holds(lane) is true. Apart from that, each thread does what one thread alone would.
template <class Vote>
struct WarpSearcher {
  using Costs = TileCosts;
  static constexpr bool fills_lanes = false;

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

// Calls body(i) for every i < count; ends with a barrier.
template <class Threads, class Body>
FP_HOST_DEVICE void each(Threads& threads, i32 count, Body&& body) {
  threads.phase([&](i32 thread) {
    for (i32 i = thread; i < count; i += num_threads) body(i);
  });
}

// Calls store(i, sum of load(j) over j < i) for every i < count and returns the address of the total. Addition must be
// associative; the order of the terms is kept. `sums`: [2 * num_threads].
template <class Threads, class T, class Load, class Store>
FP_HOST_DEVICE const T* exclusive_scan(Threads& threads, i32 count, T* sums, Load&& load, Store&& store) {
  const i32 each = ceil_div(count, num_threads), summing = each > 0 ? ceil_div(count, each) : 1;
  T* from = sums;
  T* to = sums + num_threads;
  threads.phase([&](i32 thread) {
    T sum{};
    for (i32 i = thread * each; i < min_of(count, (thread + 1) * each); ++i) sum = sum + load(i);
    from[thread] = sum;
  });
  for (i32 distance = 1; distance < summing; distance *= 2) {
    threads.phase(
        [&](i32 thread) { to[thread] = thread < distance ? from[thread] : from[thread - distance] + from[thread]; });
    T* const other = from;
    from = to;
    to = other;
  }
  threads.phase([&](i32 thread) {
    T sum = thread == 0 ? T{} : from[thread - 1];
    for (i32 i = thread * each; i < min_of(count, (thread + 1) * each); ++i) {
      const T mine = load(i);
      store(i, sum);
      sum = sum + mine;
    }
  });
  return from + summing - 1;
}

}  // namespace flashpage::plan
