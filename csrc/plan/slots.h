// Plans into staging slots and copies them.
#pragma once
#include "plan_call.h"

namespace flashpage::host {

// Plans into a free slot and copies the plan, or the two plans of a batch, to the call's destination in the stream's
// order. A plan that exceeds the call's limits is not copied.
int32_t slots_plan(fp_plan_call& call, void* stream);
// Makes no plan (call.made_parts is 0) if one plan is better than two, or if two do not fit.
int32_t slots_plan_parts(fp_plan_call& call, void* stream);

}  // namespace flashpage::host
