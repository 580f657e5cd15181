// The number of stages of K and V in a kernel. Its Traits give the maximum; the bytes are counted here by sizeof, so
// that only the compiled header needs to know them.
#pragma once
#include "flashpage/common/math.h"

namespace flashpage {

// The most shared memory of each of `ctas_per_sm` CTAs on an SM of Hopper: it has 228 KiB, of which the system takes 1
// KiB for each CTA.
FP_HOST_DEVICE constexpr int cta_shared_bytes(int ctas_per_sm) { return (228 << 10) / ctas_per_sm - (1 << 10); }

template <class Given, int count>
struct WithStages : Given {
  static constexpr int stages = count;
};

// The first of `most`, `most` - `step`, ... for which Fits<WithStages<Given, stages>>::value is true; `least` is not
// checked.
template <template <class> class Fits, class Given, int most, int step, int least>
FP_HOST_DEVICE constexpr int fitting_stages() {
  if constexpr (most <= least) {
    return least;
  } else if constexpr (Fits<WithStages<Given, most>>::value) {
    return most;
  } else {
    return fitting_stages<Fits, Given, most - step, step, least>();
  }
}

// As many stages as fit Traits::ring_bytes, from 2 to Traits::stages. It counts the bytes that are loaded, because they
// hide the memory's latency. `tokens`: of all warps, in a stage.
template <class Traits>
FP_HOST_DEVICE constexpr int stages_in_flight(int tokens) {
  constexpr int row_bytes = (Traits::head_dim_qk + min_of(Traits::head_dim_vo, 256)) * sizeof(typename Traits::Cache);
  return max_of(2, min_of(Traits::stages, Traits::ring_bytes / (tokens * row_bytes)));
}

}  // namespace flashpage
