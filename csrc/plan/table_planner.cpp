// Planning from lengths in a device's memory: the kernel's parameters and launch, and the same planner on the CPU,
// where threads run one after another.
#include <cstring>

#include "cuda/kernel.h"
#include "errors.h"
#include "flashpage/plan/bounds.h"
#include "flashpage/plan/tables.h"
#include "plan/planner.h"

using namespace flashpage;
using host::fail;

namespace {

struct CountedVote {
  i32 lane;

  template <class Holds>
  i32 count(Holds&& holds) const {
    i32 found = 0;
    for (i32 other = 0; other < plan::warp; ++other) found += holds(other);
    return found;
  }
  bool leads() const { return true; }
  void meet() const {}
};

// Runs threads from the last to the first: if a thread depended on another one in the same phase, results would be
// wrong.
struct SequentialThreads {
  using Vote = CountedVote;
  static constexpr i32 searching = 1;

  template <class Body>
  void phase(Body&& body) const {
    for (i32 thread = plan::num_threads - 1; thread >= 0; --thread) body(thread);
  }
  template <class Body>
  bool any(Body&& body) const {
    bool found = false;
    phase([&](i32 thread) { found |= body(thread); });
    return found;
  }
};

// Offsets in the int workspace; the plan itself is at its beginning.
struct Layout {
  i64 units, workspace, bytes;
  i64 partial_rows;
};

plan::Heads heads_of(const fp_tables& tables) { return {tables.num_q_heads, tables.num_kv_heads, tables.visibility}; }

i64 most_rows(const fp_tables& tables) {
  return tables.q_indptr != nullptr ? tables.max_rows : static_cast<i64>(tables.batch) * tables.q_len_per_request;
}

Layout layout_of(const fp_tables& tables, const plan::Schedule& schedule) {
  const plan::Heads heads = heads_of(tables);
  const bool one_row = tables.q_indptr == nullptr && tables.q_len_per_request == 1;
  const i64 rows = most_rows(tables);
  const i64 tokens = min_of(static_cast<i64>(tables.table_columns) * tables.page_size, plan::max_i32);
  const plan::Capacity capacity{tables.batch, one_row ? 0 : rows, tables.batch * tokens, tokens};
  const plan::Bounds bounds = plan::bounds(capacity, heads, schedule);
  const i64 tiles = ceil_div<i64>(rows * heads.group(), schedule.tile_q) + tables.batch;
  const i64 units = schedule.fixed() ? plan::one_wave(schedule, heads.num_kv_heads).heads * tiles : schedule.num_ctas;
  Layout layout{};
  layout.units = round_up<i64>(bounds.bytes, 16);
  layout.workspace = round_up<i64>(layout.units + units * sizeof(plan::CutUnit), 16);
  layout.bytes = layout.workspace + plan::Workspace(nullptr, tables.batch, schedule).bytes;
  layout.partial_rows = bounds.partial_rows;
  return layout;
}

int32_t check(const fp_tables& tables, const fp_schedule& schedule) {
  if (int32_t status = host::check_schedule(schedule, tables.num_q_heads, tables.num_kv_heads)) return status;
  if (tables.batch < 0 || tables.page_size < 1 || (tables.batch > 0 && tables.seq_lens == nullptr)) {
    return fail(FP_INTERNAL, "batch is %d, page_size is %d, seq_lens is %sgiven", tables.batch, tables.page_size,
                tables.seq_lens == nullptr ? "not " : "");
  }
  const i64 rows = most_rows(tables) * tables.num_q_heads;
  if (rows > plan::max_i32) {
    return fail(FP_WORKSPACE_TOO_SMALL, "%lld rows of %d heads do not fit in 31 bits: plan fewer rows",
                static_cast<i64>(most_rows(tables)), tables.num_q_heads);
  }
  return FP_OK;
}

}  // namespace

int32_t fp_tables_bounds(const fp_tables* tables, const fp_schedule* schedule, int64_t* bytes, int64_t* partial_rows) {
  if (int32_t status = check(*tables, *schedule)) return status;
  const Layout layout = layout_of(*tables, *schedule);
  *bytes = layout.bytes;
  *partial_rows = layout.partial_rows;
  return FP_OK;
}

int32_t fp_tables_plan(const fp_kernel* kernel, const fp_tables* tables, const fp_schedule* given, void* destination,
                       int64_t capacity, void* stream, int32_t enable_pdl) {
  if (int32_t status = check(*tables, *given)) return status;
  const plan::Schedule& schedule = *given;
  const Layout layout = layout_of(*tables, schedule);
  if (layout.bytes > capacity || layout.bytes > plan::max_i32) {
    return fail(FP_WORKSPACE_TOO_SMALL, "planning on the device needs %lld bytes but the int workspace has %lld",
                layout.bytes, static_cast<i64>(capacity));
  }
  const plan::Heads heads = heads_of(*tables);
  char* const memory = static_cast<char*>(destination);
  const plan::Tables lengths{.q_indptr = tables->q_indptr,
                             .seq_lens = tables->seq_lens,
                             .table_rows = tables->table_rows,
                             .num_requests = tables->num_requests,
                             .table_stride = tables->table_stride,
                             .num_table_rows = tables->num_table_rows,
                             .table_columns = tables->table_columns,
                             .batch = tables->batch,
                             .q_len_per_request = tables->q_len_per_request,
                             .max_rows = tables->max_rows,
                             .page_size = tables->page_size,
                             .lens_are_int64 = tables->lens_are_int64 != 0,
                             .rows_are_int64 = tables->rows_are_int64 != 0};
  const plan::TablePlan params{lengths,
                               heads,
                               schedule,
                               plan::CostModel(heads, schedule),
                               plan::CutRules(schedule),
                               memory,
                               reinterpret_cast<plan::CutUnit*>(memory + layout.units),
                               memory + layout.workspace};
  if (kernel != nullptr) return fp_launch(kernel, &params, 1, stream, enable_pdl);
  SequentialThreads threads;
  const plan::Workspace work(params.workspace, tables->batch, schedule);
  plan::TablePlanner<SequentialThreads>(threads, params, work).run();
  return FP_OK;
}
