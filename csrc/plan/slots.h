// The staging slots of plans, for the functions that plan into them.
#pragma once
#include "plan_call.h"

namespace flashpage::host {

// One plan, or two that are one batch, into a free slot and from there to the call's destination, in the stream's
// order. A plan that exceeds the call's limits is not copied.
int32_t slots_plan(fp_plan_call& call, void* stream);
// No plan (call.made_parts is 0) where one is better than two or these have no room.
int32_t slots_plan_parts(fp_plan_call& call, void* stream);

}  // namespace flashpage::host
