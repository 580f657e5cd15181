// Traces: time stamps of each CTA in kernels that are compiled with a trace. Other kernels contain no code for them.
#pragma once
#include "flashpage/params/params.h"
#include "flashpage/ptx/clock.h"

namespace flashpage {

// tests/bench/trace.py reads this list.
enum class Stamp {
  start,       // the CTA runs and may read global memory
  plan_known,  // its first unit is known
  first_load,  // copies of its first K and V are issued
  first_tile,  // they have arrived
  last_tile,   // the last ones were used
  written,     // the last unit's rows are written
  end,         // merges are done
  sm,          // not a time: the number of the CTA's SM
  count,
};

// Called by one thread of the CTA; a later stamp of the same kind replaces an earlier one.
template <class Traits>
FP_DEVICE void stamp(const AttentionParams& params, Stamp kind) {
  if constexpr (Traits::trace) {
    if (params.trace) {
      params.trace[blockIdx.x * static_cast<int>(Stamp::count) + static_cast<int>(kind)] =
          kind == Stamp::sm ? ptx::sm_index() : ptx::nanoseconds();
    }
  }
}
// Stamps only if this launch has no stamp of the kind yet; the host clears stamps before a launch.
template <class Traits>
FP_DEVICE void stamp_first(const AttentionParams& params, Stamp kind) {
  if constexpr (Traits::trace) {
    if (params.trace && !params.trace[blockIdx.x * static_cast<int>(Stamp::count) + static_cast<int>(kind)])
      stamp<Traits>(params, kind);
  }
}

}  // namespace flashpage
