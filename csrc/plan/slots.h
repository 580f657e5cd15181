// What Python's own calls have of the staging slots.
#pragma once
#include "flashpage.h"

namespace flashpage::host {

// Two plans in one slot and one copy, where they are better than one: fp_py_slots_plan_parts.
int32_t slots_plan_parts(const fp_slots_call& call, fp_parts& parts, void* stream);

}  // namespace flashpage::host
