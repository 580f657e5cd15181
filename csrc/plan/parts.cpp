// Mixed batches: a request with few rows reads its keys and values at the speed of memory and hardly computes; one with
// many rows computes and hardly reads. In two launches side by side, each with the kernel made for it and a share of
// the CTAs, both proceed at once, because some of the SMs suffice to saturate memory.
#include "plan/parts.h"

#include <algorithm>
#include <iterator>
#include <vector>

#include "flashpage/plan/cost.h"
#include "flashpage/plan/work_item.h"
#include "plan/planner.h"
#include "plan/typical_rows.h"

using namespace flashpage;

namespace flashpage::host {
namespace {

// The kernel for many rows reads keys and values more slowly than the other one, however few rows use them.
constexpr double few_in_many = 1.1;

fp_problem few_of(const fp_problem& problem, const fp_parts& parts) {
  fp_problem few = problem;
  few.most_rows = parts.most_few_rows;
  return few;
}

fp_problem many_of(const fp_problem& problem, const fp_parts& parts) {
  fp_problem many = problem;
  many.least_rows = parts.most_few_rows + 1;
  return many;
}

// Nanoseconds on all of the schedule's CTAs, evenly spread; negative if the lengths are wrong.
double cost_of(const fp_problem& problem, const fp_schedule& schedule) {
  static thread_local std::vector<plan::Request> requests;
  const plan::Heads heads = heads_of(problem);
  plan::LengthTotals totals;
  const auto fault = plan::read_lengths(lengths_of(problem, schedule), heads, schedule.tile_q, requests, totals);
  if (fault.error != plan::LengthError::none) return -1.0;
  plan::lay_on_axis(plan::CostModel(heads, schedule), heads.num_kv_heads, totals.parts, requests.data());
  return requests[totals.parts].cost / schedule.num_ctas;
}

struct Shares {
  int32_t few_ctas = 0;
  double ns = 0.0;
};

// The cost without what each unit takes besides its tokens.
double cost_of_tokens(const fp_problem& problem, fp_schedule schedule) {
  schedule.ns_per_unit = schedule.least_ns_of_unit = 0.0;
  return cost_of(problem, schedule);
}

// Divides the CTAs so that both parts end together. Lanes should be full, so the share is a multiple of the KV heads.
// `few_ns` is what all CTAs take for requests of few rows, and `few_alone_ns` what they would take if each CTA read as
// fast as one that reads alone: on few CTAs memory is no limit, but the time of their units is.
Shares best_shares(double few_ns, double few_alone_ns, double many_ns, int32_t num_ctas, int32_t num_kv_heads) {
  const int32_t step = std::min(num_kv_heads, 8);
  Shares best;
  for (int32_t few = step; few < num_ctas; few += step) {
    const double few_at = std::max(few_ns, few_alone_ns * num_ctas / few);
    const double many_at = many_ns * num_ctas / (num_ctas - few);
    const double ns = std::max(few_at, many_at);
    // Among equal times, the part that waits for memory gets the most CTAs, but some are left: few units on very few
    // CTAs take longer than their cost says (512 rows on 4 of them).
    const bool leaves_some = num_ctas - few >= num_ctas / 12;
    if (best.few_ctas == 0 || ns < best.ns || (ns == best.ns && leaves_some)) best = {few, ns};
  }
  return best;
}

// The CTAs of the first part; 0 if one plan is better.
int32_t divide(const fp_problem& problem, fp_parts& parts) {
  const fp_problem few = few_of(problem, parts), many = many_of(problem, parts);
  if (parts.few->num_ctas != parts.many->num_ctas) return 0;
  const double few_ns = cost_of(few, *parts.few), many_ns = cost_of(many, *parts.many);
  if (few_ns <= 0.0 || many_ns <= 0.0) return 0;
  double few_in_whole = cost_of(few, *parts.whole);
  if (parts.whole->tile_q > parts.few->tile_q) {
    few_in_whole = std::max(few_in_whole, few_in_many * parts.reading_share * few_ns);
  }
  const double tokens_ns = cost_of_tokens(few, *parts.few);
  const double few_alone_ns = few_ns - tokens_ns + parts.full_speed_share * tokens_ns;
  const Shares shares = best_shares(few_ns, few_alone_ns, many_ns, parts.few->num_ctas, problem.num_kv_heads);
  parts.whole_ns = few_in_whole + cost_of(many, *parts.whole);
  parts.parts_ns = shares.ns;
  const double least_gain = parts.least_gain_ns + parts.least_gain_share * parts.whole_ns;
  return parts.whole_ns - parts.parts_ns >= least_gain ? shares.few_ctas : 0;
}

void add(const fp_plan_result& part, fp_plan_result& sum) {
  sum.num_ctas += part.num_ctas;
  sum.num_items += part.num_items;
  sum.num_merges += part.num_merges;
  sum.num_partial_rows += part.num_partial_rows;
  sum.most_merge_rounds = std::max(sum.most_merge_rounds, part.most_merge_rounds);
  sum.cost_total_ns += part.cost_total_ns;
  sum.cost_max_ns = std::max(sum.cost_max_ns, part.cost_max_ns);
}

}  // namespace

int32_t plan_parts(const fp_problem& problem, fp_parts& parts, void* buffer, int64_t capacity, fp_plan_result& result) {
  parts.few_ctas = 0;
  const int32_t few_ctas = divide(problem, parts);
  if (few_ctas == 0) return FP_OK;
  const fp_problem problems[] = {few_of(problem, parts), many_of(problem, parts)};
  parts.schedules[0] = *parts.few;
  parts.schedules[1] = *parts.many;
  parts.schedules[0].num_ctas = few_ctas;
  parts.schedules[1].num_ctas = parts.few->num_ctas - few_ctas;
  for (fp_schedule& schedule : parts.schedules) std::fill_n(schedule.clusters, std::size(schedule.clusters), 0);
  int32_t status = fp_plan(&problems[0], &parts.schedules[0], buffer, capacity, &parts.results[0]);
  if (status != FP_OK && status != FP_WORKSPACE_TOO_SMALL) return status;
  parts.second_offset = round_up<i64>(parts.results[0].used_bytes, alignof(PlanHeader));
  parts.second_partial_row =
      round_up<i64>(parts.results[0].num_partial_rows, 4);  // so that their LSEs start on 16 bytes
  const int64_t left = capacity - parts.second_offset;
  status = fp_plan(&problems[1], &parts.schedules[1], static_cast<char*>(buffer) + parts.second_offset,
                   std::max<int64_t>(left, 0), &parts.results[1]);
  if (status != FP_OK && status != FP_WORKSPACE_TOO_SMALL) return status;
  if (parts.second_partial_row + parts.results[1].num_partial_rows > parts.most_partial_rows) return FP_OK;
  result = parts.results[0];
  add(parts.results[1], result);
  result.used_bytes = parts.second_offset + parts.results[1].used_bytes;
  parts.few_ctas = few_ctas;
  return result.used_bytes <= capacity ? FP_OK : FP_WORKSPACE_TOO_SMALL;
}

}  // namespace flashpage::host

void fp_parts_count(const fp_problem* problem, fp_parts* parts) {
  parts->few_requests = parts->few_rows = parts->many_requests = parts->many_rows = 0;
  parts->few_typical_rows = 1;
  if (problem->q_indptr.data == nullptr) return;  // all requests have the same number of rows
  host::TypicalRows typical(*problem);
  for (int32_t i = 0; i < problem->batch; ++i) {
    const int64_t rows = host::rows_of_request(*problem, i);
    if (rows <= 0) continue;
    const bool is_few = rows <= parts->most_few_rows;
    (is_few ? parts->few_requests : parts->many_requests) += 1;
    (is_few ? parts->few_rows : parts->many_rows) += rows;
    if (is_few) typical.add(rows, host::visible_of_request(*problem, i));
  }
  parts->few_typical_rows = typical.rows();
}
