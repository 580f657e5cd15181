// Traces: time stamps of each CTA in kernels that are compiled with a trace. Other kernels contain no code for them.
#pragma once
#include "flashpage/params/params.h"
#include "flashpage/params/stamp.h"
#include "flashpage/ptx/clock.h"

namespace flashpage {

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
