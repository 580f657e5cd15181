// Operations of the CPU backend that need no compiled kernel.
#pragma once
#include "flashpage.h"

namespace flashpage::host {

// Combines the partials of a plan (PlanHeader::num_merges items) on the pool: an fp_cpu_function over MergeParams,
// which does all of them in one call.
template <class Out>
void merge_partials(const void* params, const VariantArgs*, int32_t, int32_t);

}  // namespace flashpage::host
