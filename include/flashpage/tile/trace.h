// When what happened, CTA by CTA: stamps of a kernel that was compiled with a trace. No code in any other.
#pragma once
#include "flashpage/params/params.h"
#include "flashpage/ptx/clock.h"

namespace flashpage {

// tests/bench/trace.py reads this list.
enum class Stamp {
  start,       // the CTA runs and may read global memory
  plan_known,  // its first unit is known
  first_load,  // its first K and V are on their way
  first_tile,  // they have arrived
  last_tile,   // the last ones were used
  written,     // the last unit's rows are written
  end,         // merged what was to merge
  sm,          // no time: the number of its SM
  count,
};

// By one thread of the CTA; a later one of the same kind replaces it.
template <class Traits>
FP_DEVICE void stamp(const AttentionParams& params, Stamp kind) {
  if constexpr (Traits::trace) {
    if (params.trace) {
      params.trace[blockIdx.x * static_cast<int>(Stamp::count) + static_cast<int>(kind)] =
          kind == Stamp::sm ? ptx::sm_index() : ptx::nanoseconds();
    }
  }
}
// Only where nothing of the kind was stamped yet in this launch; the host clears the stamps before.
template <class Traits>
FP_DEVICE void stamp_first(const AttentionParams& params, Stamp kind) {
  if constexpr (Traits::trace) {
    if (params.trace && !params.trace[blockIdx.x * static_cast<int>(Stamp::count) + static_cast<int>(kind)])
      stamp<Traits>(params, kind);
  }
}

}  // namespace flashpage
