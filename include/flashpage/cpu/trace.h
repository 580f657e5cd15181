// Stamps of CTAs in CPU kernels that are compiled with a trace; other kernels contain no code for them.
#pragma once
#include <sched.h>
#include <time.h>

#include "flashpage/params/params.h"
#include "flashpage/params/stamp.h"

namespace flashpage::cpu {

inline u64 nanoseconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<u64>(now.tv_sec) * 1000000000u + static_cast<u64>(now.tv_nsec);
}

// A later stamp of the same kind replaces an earlier one.
template <class Traits>
void stamp(const AttentionParams& params, i32 cta, Stamp kind) {
  if constexpr (Traits::trace) {
    if (params.trace)
      params.trace[cta * static_cast<int>(Stamp::count) + static_cast<int>(kind)] =
          kind == Stamp::sm ? static_cast<u64>(sched_getcpu()) : nanoseconds();
  }
}
// Stamps only if the CTA has no stamp of the kind yet.
template <class Traits>
void stamp_first(const AttentionParams& params, i32 cta, Stamp kind) {
  if constexpr (Traits::trace) {
    if (params.trace && !params.trace[cta * static_cast<int>(Stamp::count) + static_cast<int>(kind)])
      stamp<Traits>(params, cta, kind);
  }
}

}  // namespace flashpage::cpu
