// The CPU backend's operations that need no compiled kernel.
#pragma once
#include "flashpage.h"

namespace flashpage::host {

// Combines the partials of a plan (PlanHeader::num_merges items) on the pool. out_dtype: 0 fp32, 1 fp16, 2 bf16.
int32_t merge_partials(const MergeParams& params, int32_t out_dtype);

}  // namespace flashpage::host
