// Functions that the planner's entry points share.
#pragma once
#include "flashpage.h"
#include "flashpage/plan/read_lengths.h"
#include "flashpage/plan/schedule.h"

namespace flashpage::host {

plan::Heads heads_of(const fp_problem& problem);
plan::Lengths lengths_of(const fp_problem& problem, const fp_schedule& schedule);
// Returns FP_OK, or FP_INTERNAL if no schedule can have these numbers.
int32_t check_schedule(const fp_schedule& schedule, int32_t num_q_heads, int32_t num_kv_heads);

}  // namespace flashpage::host
