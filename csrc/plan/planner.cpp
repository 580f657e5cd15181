// The planner's C ABI over include/flashpage/plan/: lengths -> cost axis -> cuts or dealt units -> the plan's bytes.
#include "plan/planner.h"

#include <cstring>
#include <optional>
#include <vector>

#include "errors.h"
#include "flashpage/plan/bounds.h"
#include "flashpage/plan/mask_cells.h"
#include "flashpage/plan/one_tile_writer.h"
#include "flashpage/plan/own_ctas.h"
#include "flashpage/plan/whole_units.h"

using namespace flashpage;
using host::fail;

static plan::IndexArray to_index(const fp_index_array& array) {
  return {array.data, array.stride, array.is_int64 != 0};
}

plan::Heads host::heads_of(const fp_problem& problem) {
  return {problem.num_q_heads, problem.num_kv_heads, problem.visibility};
}

static_assert(sizeof(plan::RowRun) == 3 * sizeof(int32_t));

plan::Lengths host::lengths_of(const fp_problem& problem, const fp_schedule& schedule) {
  return {problem.batch,
          problem.q_len_per_request,
          to_index(problem.q_indptr),
          to_index(problem.kv_indptr),
          to_index(problem.last_page_len),
          to_index(problem.kv_lens),
          problem.page_size,
          problem.has_custom_mask != 0,
          problem.has_mask_tiles && !problem.has_custom_mask ? cell_tiles * schedule.tile_kv : 0,
          problem.least_rows,
          problem.most_rows,
          reinterpret_cast<const plan::RowRun*>(problem.row_runs),
          problem.num_row_runs};
}

static constexpr int32_t max_kv_heads = 65535;  // CtaItems::kv_head and place are 16 bits

int32_t host::check_schedule(const fp_schedule& schedule, int32_t num_q_heads, int32_t num_kv_heads) {
  if (schedule.num_ctas < 1 || schedule.tile_q < 1 || schedule.merge_rows < 1) {
    return fail(FP_INTERNAL, "schedule has num_ctas %d, tile_q %d, merge_rows %d: each must be at least 1",
                schedule.num_ctas, schedule.tile_q, schedule.merge_rows);
  }
  if (num_kv_heads > max_kv_heads) {
    return fail(FP_INTERNAL, "num_kv_heads is %d: a plan has at most %d", num_kv_heads, max_kv_heads);
  }
  if (num_kv_heads < 1 || num_q_heads < 1 || num_q_heads % num_kv_heads != 0) {
    return fail(FP_INTERNAL, "num_q_heads %d is not a multiple of num_kv_heads %d", num_q_heads, num_kv_heads);
  }
  return FP_OK;
}

// Python makes its sentence from the codes; the text here serves callers from C.
static int32_t fail_lengths(const plan::LengthFault& fault, fp_plan_result* result) {
  static constexpr const char* names[] = {"", "q_indptr", "kv_indptr", "last_page_len", "kv_lens"};
  static constexpr const char* faults[] = {"",
                                           "is negative",
                                           "is below the entry before it",
                                           "is outside 1..page_size (0..page_size for a request without pages)",
                                           "exceeds what the request's pages hold",
                                           "makes a total that does not fit in 31 bits",
                                           "ends rows in more chunks than a plan has"};
  result->error_array = static_cast<int32_t>(fault.array);
  result->error_reason = static_cast<int32_t>(fault.error);
  result->error_index = fault.index;
  result->error_value = fault.value;
  result->error_limit = fault.limit;
  return fail(FP_BAD_LENGTHS, "%s[%lld] = %lld %s (%lld)", names[result->error_array], fault.index, fault.value,
              faults[result->error_reason], fault.limit);
}

static void fill_result(const plan::LengthTotals& totals, fp_plan_result* result) {
  result->total_q = totals.q_rows;
  result->total_kv = totals.kv.all;
  result->total_pages = totals.kv_entries;
  result->max_q_len = totals.max_q_len;
  result->max_kv_len = static_cast<int32_t>(totals.kv.longest);
  result->mask_bytes = totals.mask_bytes;
  result->tile_cells = totals.tile_cells;
}

// Memory kept from plan to plan: nothing is allocated once a batch of this size has been planned.
struct Scratch {
  std::vector<plan::Request> requests;
  std::vector<plan::Lane> lanes;
  std::vector<plan::Cut> ends;
  std::vector<plan::TickedRequest> ticked;
  std::vector<plan::Segment> segments;
  std::vector<double> early_loads;
  std::vector<plan::Totals> before;
  std::vector<plan::CutUnit> units;
  plan::OwnCtas::Memory own;
  plan::WholeUnits::Memory whole;
};

template <class T>
static T* at_least(std::vector<T>& entries, size_t count) {
  if (entries.size() < count) entries.resize(count);
  return entries.data();
}

// The input of every strategy.
struct Batch {
  const plan::Schedule& schedule;
  const plan::CostModel& model;
  plan::CutRules rules;
  plan::Request* requests;
  int32_t count;  // of requests or their parts, on the axis
  int32_t num_kv_heads;
  int64_t units;
  Scratch& scratch;

  // Places the requests on the axis and counts the lanes.
  plan::Division divide(const plan::Axis& axis) const {
    plan::lay_on_axis(model, axis.heads, count, requests);
    plan::Lane* const lanes = at_least(scratch.lanes, schedule.num_ctas);
    const plan::Lanes made = plan::Lanes::make(schedule, num_kv_heads, axis, lanes);
    for (int32_t i = 0; i < made.num_full(); ++i) made.write_full(i, lanes);
    return {requests, count, axis, units / (num_kv_heads / axis.heads), lanes, made};
  }

  // Whether no request has more than one row tile, and no KV head lies on the axis.
  bool has_one_tile_each() const {
    return !schedule.heads_on_axis && units == static_cast<int64_t>(requests[count].number) * num_kv_heads;
  }

  // Fills the division's full lanes in integers. None: the batch is another one, or has so many requests for each lane
  // that reading each of them once more would take longer than it saves.
  std::optional<plan::OneTileLanes> one_tile_lanes(const plan::Division& division, int64_t longest) const {
    constexpr int32_t most_requests_a_lane = 4;
    const bool are_few = division.lanes.num_full() * most_requests_a_lane < count;
    if (are_few || !has_one_tile_each() || !plan::OneTileLanes::may_fill(model, rules, requests[count].cost, longest))
      return {};
    plan::TickedRequest* const memory = at_least(scratch.ticked, count + plan::OneTileLanes::past_end);
    return plan::OneTileLanes(model, rules, requests, count, memory);
  }
};

// Division in waves; the last wave cuts units if loads would be uneven.
struct Waves {
  plan::Division division;
  plan::Segment* segments;
  plan::Start last_wave;
  plan::Partition partition;

  Waves(const Batch& batch, const plan::Division& division, int64_t longest)
      : division(division), segments(at_least(batch.scratch.segments, division.axis.waves * batch.schedule.num_ctas)) {
    const std::optional<plan::OneTileLanes> one_tile = batch.one_tile_lanes(division, longest);
    const plan::OneSearcher searcher{one_tile ? &*one_tile : nullptr};
    const plan::Partitioner partitioner(batch.model, batch.rules, division, searcher);
    last_wave = partitioner.early_waves(segments, at_least(batch.scratch.early_loads, batch.schedule.num_ctas));
    plan::Cut* const ends = at_least(batch.scratch.ends, 2 * batch.schedule.num_ctas);
    partition = partitioner.last_wave(last_wave, ends, ends + batch.schedule.num_ctas);
  }

  plan::Assignment assignment(int32_t num_ctas) const {
    const int32_t waves = division.axis.waves;
    for (int32_t lane = 0; lane < division.lanes.count; ++lane) {
      segments[lane * waves + waves - 1] = partition.segment(lane);
    }
    return {division, segments, 0, partition.max, partition.mean * num_ctas};
  }
};

static std::optional<plan::Assignment> whole_units(const Batch& batch, const Waves& waves, double ns) {
  const auto better = [&](const plan::Division& division, const plan::Start& start) {
    return plan::WholeUnits(batch.model, batch.rules, division, waves.segments, start, batch.scratch.whole)
        .better_than(ns);
  };
  if (waves.division.axis.waves > 1 && batch.units <= plan::units_side_by_side * batch.schedule.num_ctas) {
    const auto found = better(batch.divide(plan::one_wave(batch.schedule, batch.num_kv_heads)), {});
    if (found) return found;
    batch.divide(waves.division.axis);  // restores the axis
  }
  return better(waves.division, waves.last_wave);
}

static plan::Assignment least_costly(const Batch& batch, const plan::KvTokens& kv) {
  const plan::Schedule& schedule = batch.schedule;
  const plan::Division division = batch.divide(plan::make_axis(schedule, batch.num_kv_heads, kv));
  std::optional<plan::OwnCtas> own;
  if (plan::may_have_own_ctas(schedule, batch.units)) {
    own.emplace(batch.model, schedule, batch.requests, batch.count, batch.num_kv_heads);
    // If groups end before any waves can, the search for the best waves, which takes longer, is saved.
    const double least = own->least_of_others(batch.rules, batch.requests[batch.count].cost / division.lanes.weight);
    if (own->least_cost() < least) {
      const plan::OwnCtas::Groups groups = own->better_than(least);
      if (groups.size > 0) return own->assign(groups, batch.scratch.own);
    }
  }
  const Waves waves(batch, division, kv.longest);
  const bool has_cuts = waves.partition.inside > 0;
  const double ns = waves.partition.max + (has_cuts ? schedule.ns_per_merge : 0.0);
  if (own) {
    const plan::OwnCtas::Groups groups = own->better_than(ns);
    if (groups.size > 0) return own->assign(groups, batch.scratch.own);
  }
  if (has_cuts && !schedule.are_claimed && plan::WholeUnits::may_be(schedule, waves.partition.mean)) {
    const auto found = whole_units(batch, waves, ns);
    if (found) return *found;
  }
  return waves.assignment(schedule.num_ctas);
}

static int32_t write(const Batch& batch, const plan::Assignment& assignment, void* buffer, int64_t capacity,
                     fp_plan_result* result) {
  const plan::Schedule& schedule = batch.schedule;
  const plan::Division& division = assignment.division;
  const plan::Lanes& lanes = division.lanes;
  // Full lanes are counted while they are written, if the buffer holds the items in any case and at most one unit a
  // lane is cut.
  const int64_t most_item_bytes =
      plan::items_offset(schedule) +
      plan::most_items(batch.count, division.axis, lanes, division.lane) * static_cast<int64_t>(sizeof(WorkItem));
  const bool at_once = !schedule.fixed() && most_item_bytes <= capacity;
  const int32_t counted = at_once ? lanes.num_small : lanes.count;
  plan::Totals* const before = at_least(batch.scratch.before, lanes.count + 1);
  plan::PlanMemory memory{before, at_once ? at_least(batch.scratch.units, lanes.count + 1) : nullptr,
                          static_cast<char*>(buffer)};
  const plan::OneTileWriter writer(batch.model, schedule, assignment, memory);
  plan::Totals totals{};
  const int32_t one_by_one = at_once && batch.has_one_tile_each() ? lanes.num_small : lanes.count;
  for (int32_t lane = 0; lane < one_by_one; ++lane) {
    before[lane] = totals;
    lane < counted ? writer.add_lane<plan::Items::none>(lane, totals) : writer.add_lane<plan::Items::all>(lane, totals);
  }
  if (one_by_one < lanes.count) writer.add_full_lanes(totals);
  before[lanes.count] = totals;
  result->used_bytes = writer.used_bytes();
  if (result->used_bytes > plan::max_i32 || writer.num_partial_rows() > plan::max_i32) {
    return fail_lengths({plan::LengthArray::q_indptr, plan::LengthError::overflow, batch.count,
                         max_of<i64>(result->used_bytes, writer.num_partial_rows()), plan::max_i32},
                        result);
  }
  const PlanHeader header = writer.header();
  result->num_ctas = header.num_ctas;
  result->num_items = header.num_items;
  result->num_merges = header.num_merges;
  result->num_partial_rows = header.num_partial_rows;
  result->cluster_size = header.cluster_size;
  result->cost_total_ns = assignment.total_ns;
  result->cost_max_ns = assignment.most_ns;
  if (result->used_bytes > capacity) {
    return fail(FP_WORKSPACE_TOO_SMALL, "the plan needs %lld bytes but the int workspace has %lld: pass a larger one",
                static_cast<i64>(result->used_bytes), static_cast<i64>(capacity));
  }
  const int32_t num_units = static_cast<int32_t>(before[lanes.count].units);
  memory.units = at_least(batch.scratch.units, num_units + 1);
  std::memcpy(buffer, &header, sizeof(header));
  totals = {};
  for (int32_t lane = 0; lane < counted; ++lane) writer.add_lane<plan::Items::all>(lane, totals);
  for (int32_t lane = 0; lane < lanes.count; ++lane) writer.write_starts(lane);
  for (int32_t unit = 0; unit < num_units; ++unit) {
    writer.write_merges(unit);
    result->most_merge_rounds = max_of(result->most_merge_rounds, writer.rounds_of(unit));
  }
  return FP_OK;
}

static int32_t plan_problem(const fp_problem* problem, const fp_schedule* given, void* buffer, int64_t capacity,
                            fp_plan_result* result) {
  *result = {};
  if (int32_t status = host::check_schedule(*given, problem->num_q_heads, problem->num_kv_heads)) return status;
  if (problem->batch < 0 || !problem->kv_indptr.data) {
    return fail(FP_INTERNAL, "batch is %d, kv_indptr is %sgiven", problem->batch,
                problem->kv_indptr.data ? "" : "not ");
  }
  static thread_local Scratch scratch;
  plan::Schedule schedule = *given;
  const plan::Heads heads = host::heads_of(*problem);
  plan::LengthTotals totals;
  const plan::LengthFault fault =
      plan::read_lengths(host::lengths_of(*problem, schedule), heads, schedule.tile_q, scratch.requests, totals);
  fill_result(totals, result);
  if (fault.error != plan::LengthError::none) return fail_lengths(fault, result);

  // Claimed units balance themselves. If there are few, they are cut nevertheless.
  const bool are_many = 2 * totals.units >= 3 * int64_t{schedule.num_ctas};
  if (schedule.are_claimed && are_many && schedule.balanced()) schedule.fixed_piece_tokens = -1;
  const plan::CostModel model(heads, schedule);
  const Batch batch{
      schedule,     model,  plan::CutRules(schedule), scratch.requests.data(), totals.parts, heads.num_kv_heads,
      totals.units, scratch};
  return write(batch, least_costly(batch, totals.served), buffer, capacity, result);
}

int32_t fp_merge_rounds(int32_t partials, int32_t jobs) { return merge_rounds(partials, jobs); }

int32_t fp_plan_bounds(int32_t max_batch, int64_t max_q_rows, int64_t max_kv_tokens, int64_t max_kv_tokens_of_one,
                       int32_t num_q_heads, int32_t num_kv_heads, const Visibility* visibility,
                       const fp_schedule* given, int64_t* plan_bytes, int64_t* partial_rows) {
  if (int32_t status = host::check_schedule(*given, num_q_heads, num_kv_heads)) return status;
  const int64_t of_one = max_kv_tokens_of_one > 0 ? max_kv_tokens_of_one : max_kv_tokens;
  const plan::Capacity capacity{max_batch, max_q_rows, max_kv_tokens, of_one};
  const plan::Bounds bounds = plan::bounds_with_own_ctas(capacity, {num_q_heads, num_kv_heads, *visibility}, *given);
  *plan_bytes = bounds.bytes;
  *partial_rows = bounds.partial_rows;
  return FP_OK;
}

int32_t fp_plan(const fp_problem* problem, const fp_schedule* schedule, void* buffer, int64_t capacity,
                fp_plan_result* result) {
  return host::guarded("fp_plan", [&] { return plan_problem(problem, schedule, buffer, capacity, result); });
}
