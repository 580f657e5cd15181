// The planner's C ABI over include/flashpage/plan/: lengths -> cost axis -> cuts, or units dealt -> the plan's bytes.
#include "plan/planner.h"

#include <cstring>
#include <optional>
#include <vector>

#include "errors.h"
#include "flashpage/plan/bounds.h"
#include "flashpage/plan/emit.h"
#include "flashpage/plan/whole_units.h"
#include "flashpage/tile/mask/lane_bits.h"
#include "flashpage/tile/mask/mask_tiles.h"

using namespace flashpage;
using host::fail;

static plan::IndexArray to_index(const fp_index_array& array) {
  return {array.data, array.stride, array.is_int64 != 0};
}

plan::Schedule host::to_schedule(const fp_schedule& schedule) {
  return {.num_ctas = schedule.num_ctas,
          .walk = schedule.walk == FP_WALK_TEAMS ? plan::Walk::teams : plan::Walk::runs,
          .tile_q = schedule.tile_q,
          .tile_kv = schedule.tile_kv,
          .ns_per_token = schedule.ns_per_token,
          .ns_per_unit = schedule.ns_per_unit,
          .few_rows_cost = schedule.few_rows_cost,
          .ns_per_piece = schedule.ns_per_piece,
          .ns_per_merge = schedule.ns_per_merge,
          .min_piece_tokens = schedule.min_piece_tokens,
          .max_pieces = schedule.max_pieces,
          .fixed_piece_tokens = schedule.fixed_piece_tokens,
          .merge_rows = schedule.merge_rows,
          .wave_tokens = schedule.wave_tokens};
}

plan::Clusters host::to_clusters(const fp_schedule& schedule) {
  plan::Clusters clusters{.resident = {},
                          .max_rows = schedule.cluster_rows,
                          .min_piece_tokens = schedule.cluster_piece_tokens,
                          .full_speed_share = schedule.full_speed_share,
                          .ns_per_cluster_merge = schedule.ns_per_cluster_merge};
  static_assert(sizeof(clusters.resident) == sizeof(schedule.clusters));
  std::memcpy(clusters.resident, schedule.clusters, sizeof(clusters.resident));
  return clusters;
}

plan::Heads host::heads_of(const fp_problem& problem) {
  return {problem.num_q_heads, problem.num_kv_heads, problem.causal != 0, problem.window_left};
}

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
          problem.most_rows};
}

static constexpr int32_t max_kv_heads = 65535;  // CtaItems::kv_head and walk are 16 bits

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

// The codes are what Python makes its sentence of; the text here serves callers from C.
static int32_t fail_lengths(const plan::LengthFault& fault, fp_plan_result* result) {
  static constexpr const char* names[] = {"", "q_indptr", "kv_indptr", "last_page_len", "kv_lens"};
  static constexpr const char* faults[] = {"",
                                           "is negative",
                                           "is below the entry before it",
                                           "is outside 1..page_size (0..page_size for a request without pages)",
                                           "exceeds what the request's pages hold",
                                           "makes a total that does not fit in 31 bits"};
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

// Kept from plan to plan: no allocation once a batch of this size has been seen.
struct Scratch {
  std::vector<plan::Request> requests;
  std::vector<plan::Lane> lanes;
  std::vector<plan::Cut> ends, early_ends;
  std::vector<double> early_loads;
  std::vector<plan::Totals> before;
  std::vector<plan::CutUnit> units;
  plan::WholeUnits::Memory whole;
};

// A batch on a cost axis, cut in shares that are alike where nothing is dealt.
struct Walk {
  plan::Division division;
  plan::Partitioner<plan::OneSearcher> partitioner;
  plan::Start last_wave;
  plan::Partition partition;
};

static int32_t fail_small(const fp_plan_result& result, int64_t capacity) {
  return fail(FP_WORKSPACE_TOO_SMALL, "the plan needs %lld bytes but the int workspace has %lld: pass a larger one",
              static_cast<i64>(result.used_bytes), static_cast<i64>(capacity));
}

static void fill_counts(const PlanHeader& header, fp_plan_result* result) {
  result->num_ctas = header.num_ctas;
  result->num_items = header.num_items;
  result->num_merges = header.num_merges;
  result->num_partial_rows = header.num_partial_rows;
  result->cluster_size = header.cluster_size;
}

static int32_t write_own(const plan::OwnCtas& own, void* buffer, int64_t capacity, fp_plan_result* result) {
  const PlanHeader header = own.header();
  fill_counts(header, result);
  result->used_bytes = header.used_bytes;
  result->cost_total_ns = own.total_ns();
  result->cost_max_ns = own.most_ns();
  if (result->used_bytes > capacity) return fail_small(*result, capacity);
  own.write(buffer);
  return FP_OK;
}

template <class T>
static T* at_least(std::vector<T>& entries, size_t count) {
  if (entries.size() < count) entries.resize(count);
  return entries.data();
}

int32_t fp_plan(const fp_problem* problem, const fp_schedule* given, void* buffer, int64_t capacity,
                fp_plan_result* result) {
  *result = {};
  if (int32_t status = host::check_schedule(*given, problem->num_q_heads, problem->num_kv_heads)) return status;
  if (problem->batch < 0 || !problem->kv_indptr.data) {
    return fail(FP_INTERNAL, "batch is %d, kv_indptr is %sgiven", problem->batch,
                problem->kv_indptr.data ? "" : "not ");
  }
  static thread_local Scratch scratch;
  plan::Schedule schedule = host::to_schedule(*given);
  const plan::Heads heads = host::heads_of(*problem);
  const plan::Lengths lengths = host::lengths_of(*problem, *given);
  plan::Request* requests = at_least(scratch.requests, problem->batch + 1);

  plan::LengthTotals totals;
  const plan::LengthFault fault =
      plan::read_lengths(lengths, heads.num_kv_heads, heads.group(), schedule.tile_q, requests, totals);
  fill_result(totals, result);
  if (fault.error != plan::LengthError::none) return fail_lengths(fault, result);

  // Units that are claimed even out by themselves. What few CTAs would claim is cut all the same.
  const bool are_many = 2 * totals.units >= 3 * int64_t{schedule.num_ctas};
  if (given->are_claimed && are_many && schedule.balanced()) schedule.fixed_piece_tokens = -1;

  const plan::CostModel model(heads, schedule);
  const plan::CutRules rules(schedule);
  plan::Lane* lanes = at_least(scratch.lanes, schedule.num_ctas);
  const auto divide = [&](const plan::Axis& axis) {
    plan::lay_on_axis(model, axis.copies, problem->batch, requests);
    const auto made = plan::Lanes::make(schedule, heads.num_kv_heads, axis, lanes);
    for (int32_t i = 0; i < made.num_full(); ++i) made.write_full(i, lanes);
    const int64_t units_on_axis = totals.units / (heads.num_kv_heads / axis.copies);
    return plan::Division{requests, problem->batch, axis, units_on_axis, lanes, made};
  };
  const plan::OneSearcher searcher;
  const auto walk = [&](const plan::Axis& axis) {
    const plan::Division division = divide(axis);
    const plan::Partitioner partitioner(model, rules, division, searcher);
    plan::Cut* ends = at_least(scratch.ends, 2 * schedule.num_ctas);
    plan::Cut* early_ends = at_least(scratch.early_ends, (axis.waves - 1) * schedule.num_ctas);
    const plan::Start last_wave = partitioner.early_waves(early_ends, at_least(scratch.early_loads, schedule.num_ctas));
    return Walk{division, partitioner, last_wave, partitioner.run(last_wave, ends, ends + schedule.num_ctas)};
  };
  const plan::Axis axis = plan::make_axis(schedule, heads.num_kv_heads, totals.served);
  const Walk in_waves = walk(axis);

  const plan::Clusters clusters = host::to_clusters(*given);
  if (clusters.any() && schedule.balanced()) {
    plan::OwnCtas own(model, schedule, clusters, requests, problem->batch, heads.num_kv_heads);
    if (own.is_better_than(in_waves.partition.max, in_waves.partition.inside > 0, totals.units / heads.num_kv_heads))
      return write_own(own, buffer, capacity, result);
  }
  const bool may_be_dealt = in_waves.partition.inside > 0 && !given->are_claimed &&
                            plan::WholeUnits::may_be(schedule, in_waves.partition.mean);
  const double most_ns = in_waves.partition.max + schedule.ns_per_merge;
  std::optional<Walk> side_by_side;
  std::optional<plan::WholeUnits> whole;
  const auto deal = [&](const Walk& way) {
    whole.emplace(model, way.division, way.partitioner, way.last_wave, scratch.whole);
    return whole->is_better_than(most_ns);
  };
  if (may_be_dealt && axis.waves > 1 && totals.units <= plan::units_side_by_side * schedule.num_ctas) {
    const plan::Division division = divide(plan::one_wave(schedule, heads.num_kv_heads));
    side_by_side.emplace(Walk{division, {model, rules, division, searcher}, {}, {}});
    if (!deal(*side_by_side)) {
      side_by_side.reset();
      divide(axis);  // as it was
    }
  }
  const bool is_dealt = side_by_side || (may_be_dealt && deal(in_waves));
  const Walk& way = side_by_side ? *side_by_side : in_waves;
  const plan::Division& division = way.division;
  const plan::Partition& partition = way.partition;
  const plan::Lanes& made = division.lanes;

  plan::Totals* before = at_least(scratch.before, made.count + 1);
  const auto emitter = [&](plan::CutUnit* units) {
    return plan::Emitter(model, schedule, division, scratch.early_ends.data(),
                         is_dealt ? whole->ends() : partition.ends, heads.num_kv_heads, before, units, buffer);
  };
  // Full lanes are counted as they are written, where items have room in any case and at most one unit a lane is cut.
  const int64_t most_item_bytes =
      plan::items_offset(schedule) +
      plan::most_items(problem->batch, division.axis, made, lanes) * static_cast<int64_t>(sizeof(WorkItem));
  const bool at_once = !schedule.fixed() && most_item_bytes <= capacity;
  const int32_t counted = at_once ? made.num_small : made.count;
  const plan::Emitter counter = emitter(at_once ? at_least(scratch.units, made.count) : nullptr);
  before[0] = {};
  for (int32_t lane = 0; lane < made.count; ++lane) {
    before[lane + 1] = lane < counted ? before[lane] + counter.count(lane) : counter.write_all(lane);
    if (is_dealt) before[lane + 1].items += whole->num_units(lane);
  }
  result->used_bytes = counter.used_bytes();
  if (result->used_bytes > plan::max_i32 || counter.num_partial_rows() > plan::max_i32) {
    return fail_lengths({plan::LengthArray::q_indptr, plan::LengthError::overflow, problem->batch,
                         max_of<i64>(result->used_bytes, counter.num_partial_rows()), plan::max_i32},
                        result);
  }
  const PlanHeader header = counter.header();
  fill_counts(header, result);
  result->cost_total_ns = is_dealt ? whole->total_ns() : partition.mean * schedule.num_ctas;
  result->cost_max_ns = is_dealt ? whole->most_ns() : partition.max;
  if (result->used_bytes > capacity) return fail_small(*result, capacity);
  const int32_t num_units = static_cast<int32_t>(before[made.count].units);
  const plan::Emitter writer = emitter(at_least(scratch.units, num_units));
  std::memcpy(buffer, &header, sizeof(header));
  for (int32_t lane = 0; lane < counted; ++lane) writer.write_all(lane);
  if (is_dealt) whole->write(writer, before);
  for (int32_t lane = 0; lane < made.count; ++lane) writer.write_resumed(lane);
  for (int32_t lane = 0; lane < made.count; ++lane) writer.write_starts(lane, 0, 1);
  for (int32_t unit = 0; unit < num_units; ++unit) writer.write_merges(unit, 0, 1);
  return FP_OK;
}

int32_t fp_plan_bounds(int32_t max_batch, int64_t max_q_rows, int64_t max_kv_tokens, int32_t num_q_heads,
                       int32_t num_kv_heads, const fp_schedule* given, int64_t* plan_bytes, int64_t* partial_rows) {
  if (int32_t status = host::check_schedule(*given, num_q_heads, num_kv_heads)) return status;
  const plan::Bounds bounds =
      plan::bounds_with_own_ctas({max_batch, max_q_rows, max_kv_tokens}, {num_q_heads, num_kv_heads, false, -1},
                                 host::to_schedule(*given), host::to_clusters(*given));
  *plan_bytes = bounds.bytes;
  *partial_rows = bounds.partial_rows;
  return FP_OK;
}

// Of any plan within these sizes, pieces of cut units included.
static i64 most_units(const fp_masked_batch& batch, i64 group, const fp_schedule& schedule) {
  const i64 units = batch.num_kv_heads * (batch.rows * group / schedule.tile_q + batch.requests);
  // In each wave, a CTA's share may begin and end inside a unit.
  if (schedule.fixed_piece_tokens == 0) return units + 2 * plan::max_waves * schedule.num_ctas;
  if (schedule.fixed_piece_tokens < 0) return units;
  // A unit of t tokens has at most t / piece more; a request of q rows and t tokens has q * t bits and some rows, or
  // the cells of its units' tokens.
  const i64 tokens_of_units = 8 * batch.mask_bytes * (group + schedule.tile_q) / schedule.tile_q +
                              batch.tile_cells * cell_tiles * schedule.tile_kv;
  return units + batch.num_kv_heads * (tokens_of_units / schedule.fixed_piece_tokens + 1);
}

int64_t fp_mask_cells(const fp_masked_batch* batch, const fp_schedule* schedule, MaskTilesParams* params) {
  const i32 group = batch->num_q_heads / batch->num_kv_heads;
  const i64 tile_cells = batch->has_custom_mask
                             ? mask_tile_cells(batch->mask_bytes, batch->rows, batch->requests, group)
                             : batch->tile_cells;
  const i64 cells = unit_cells * most_units(*batch, group, *schedule);
  params->queue_begin = round_up<i64>(first_tile_cell + batch->tile_heads * tile_cells, unit_cells);
  params->list_begin = params->queue_begin + cells;
  params->group = make_fast_div(group);
  params->tile_q = schedule->tile_q;
  params->tile_kv = schedule->tile_kv;
  params->tile_heads = batch->tile_heads;
  params->lanes_begin = params->list_begin + cells;
  if (!batch->has_custom_mask) return params->lanes_begin;
  const i64 tiles = row_tiles_before(batch->mask_bytes, batch->rows, schedule->tile_kv);
  return params->lanes_begin + tiles * 4 * lane_word_bytes(schedule->tile_kv) / 8;
}
