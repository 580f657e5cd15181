// Plans into staging slots, and copies of the plans.
#pragma once
#include "plan_call.h"

namespace flashpage::host {

// Plans into a free slot. A plan that exceeds the call's limits is not to be copied.
int32_t slots_plan(fp_plan_call& call);
// Plans the two parts of a batch. Makes no plan (call.made_parts is 0) if one is better, or if two do not fit.
int32_t slots_plan_parts(fp_plan_call& call);
// Copies the last plan, or the two plans of a batch, to the call's destination in the stream's order.
int32_t slots_publish(fp_plan_call& call, void* stream);

}  // namespace flashpage::host
