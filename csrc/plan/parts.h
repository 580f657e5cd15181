// Plans a mixed batch as two plans: one for requests of few rows and one for requests of many.
#pragma once
#include "flashpage.h"

namespace flashpage::host {

// Writes both plans to `buffer` if two are better than one (parts.few_ctas > 0). `result` has the sums.
int32_t plan_parts(const fp_problem& problem, fp_parts& parts, void* buffer, int64_t capacity, fp_plan_result& result);

}  // namespace flashpage::host
