// Planning on the card: sequence lengths and block tables are in a card's memory, and the host knows none of them. The
// plan has the same bytes as that of fp_plan for the same lengths; pages are read from the block tables in place.
#pragma once
#include "flashpage/plan/partition.h"
#include "flashpage/plan/threads.h"
#include "flashpage/plan/writer.h"

namespace flashpage::plan {

// The rows of q of one request.
struct RowRange {
  i32 begin;
  i32 end;
};

// Numbers out of range are clamped, because the device cannot report an error. An entry of q_indptr is in range if it
// is at least all entries before it, so that no row belongs to two requests, and a plan has no more rows than its
// memory was sized for.
struct Tables {
  const i32* q_indptr;      // rows, [batch + 1]; null: q_len_per_request rows each
  const void* seq_lens;     // tokens, [batch], i32 or i64
  const void* table_rows;   // rows of the block tables, [batch], i32 or i64; null: 0, 1, 2, ...
  const i32* num_requests;  // [1], at most batch; null: batch
  i64 table_stride;         // entries from a row of the block tables to the next one
  i32 num_table_rows;
  i32 table_columns;  // pages in a row
  i32 batch;
  i32 q_len_per_request;
  i32 max_rows;   // of q
  i32 page_size;  // tokens
  bool lens_are_int64;
  bool rows_are_int64;

  FP_HOST_DEVICE i32 requests() const {
    return num_requests == nullptr ? batch : max_of(0, min_of(batch, *num_requests));
  }

  FP_HOST_DEVICE i32 row_at(i32 i) const { return max_of(0, min_of(q_indptr[i], max_rows)); }
  FP_HOST_DEVICE bool falls_at(i32 i) const { return q_indptr != nullptr && row_at(i + 1) < row_at(i); }

  // If no entry falls.
  FP_HOST_DEVICE RowRange rows(i32 i) const {
    if (q_indptr == nullptr) return {i * q_len_per_request, (i + 1) * q_len_per_request};
    return {row_at(i), row_at(i + 1)};
  }

  FP_HOST_DEVICE Request request(i32 i, const RowRange& rows, const Heads& heads, i32 tile_q) const {
    const i64 most = min_of(static_cast<i64>(table_columns) * page_size, most_kv_len);
    const i64 kv_len = within(number(seq_lens, lens_are_int64, i), most);
    const i64 row = table_rows == nullptr ? i : within(number(table_rows, rows_are_int64, i), num_table_rows - 1);
    const i32 q_len = rows.end - rows.begin, tiles = ceil_div(q_len * heads.group(), tile_q);
    const i32 last = static_cast<i32>(max_of<i64>(kv_len - 1, 0));  // position of the last row: requests have one part
    const TokenRange part = part_at(heads.visibility, last, static_cast<i32>(kv_len));
    return {row * table_stride, 0, i, rows.begin, q_len, part.begin, part.end, tiles, 0, 0.0};
  }

 private:
  FP_HOST_DEVICE static i64 number(const void* numbers, bool are_int64, i32 i) {
    return are_int64 ? static_cast<const i64*>(numbers)[i] : static_cast<const i32*>(numbers)[i];
  }
  FP_HOST_DEVICE static i64 within(i64 number, i64 most) { return max_of<i64>(0, min_of(number, most)); }
};

// Everything that planning needs, passed by value.
struct TablePlan {
  Tables tables;
  Heads heads;
  Schedule schedule;
  CostModel model;
  CutRules rules;
  void* plan;       // written: the header and what follows it
  CutUnit* units;   // written: space for the maximum number
  char* workspace;  // written: Workspace, if it does not fit shared memory
};

// Sums over requests.
struct AxisSum {
  double cost;
  i64 tiles;
  i32 requests;  // that have row tiles
  FP_HOST_DEVICE AxisSum operator+(const AxisSum& other) const {
    return {cost + other.cost, tiles + other.tiles, requests + other.requests};
  }
};

// An entry of q_indptr; the sum of entries is their maximum.
struct LargestRow {
  i32 row;
  FP_HOST_DEVICE LargestRow operator+(const LargestRow& other) const { return {max_of(row, other.row)}; }
};

// Data that threads pass to each other, in memory that starts on 16 bytes.
struct Workspace {
  struct State {
    i32 batch;
    Axis axis;
    Lanes lanes;
    AxisSum all;
    Partition partition;
  };
  State* state;
  Totals* sums;         // of a scan, [2 * num_threads]; also used for AxisSums, KvTokens and LargestRows
  Totals* before;       // [num_ctas + 1]
  Lane* lanes;          // [num_ctas]
  Cut* ends;            // [2 * num_ctas]
  Segment* segments;    // [lanes.count][waves]
  double* early_loads;  // [lanes.count]
  Request* requests;    // [batch + 1]
  i64 bytes;

  FP_HOST_DEVICE Workspace(char* memory, i32 batch, const Schedule& schedule) : bytes(0) {
    const i32 num_ctas = schedule.num_ctas, waves = may_have_waves(schedule) ? max_waves : 1;
    state = take<State>(memory, 1);
    sums = take<Totals>(memory, 2 * num_threads);
    before = take<Totals>(memory, num_ctas + 1);
    lanes = take<Lane>(memory, num_ctas);
    ends = take<Cut>(memory, 2 * num_ctas);
    segments = take<Segment>(memory, waves * num_ctas);
    early_loads = take<double>(memory, waves > 1 ? num_ctas : 0);
    requests = take<Request>(memory, batch + 1);
  }

 private:
  template <class T>
  FP_HOST_DEVICE T* take(char* memory, i64 count) {
    T* taken = reinterpret_cast<T*>(memory + bytes);
    bytes = round_up<i64>(bytes + count * sizeof(T), 16);
    return taken;
  }
};
static_assert(sizeof(AxisSum) <= sizeof(Totals) && sizeof(KvTokens) <= sizeof(Totals) &&
              sizeof(LargestRow) <= sizeof(Totals));

template <class Threads>
class TablePlanner {
 public:
  FP_HOST_DEVICE TablePlanner(Threads& threads, const TablePlan& given, const Workspace& work)
      : threads_(threads), given_(given), work_(work) {}

  FP_HOST_DEVICE void run() {
    read_lengths();
    lay_out();
    threads_.phase([&](i32 thread) {
      if (thread < Threads::searching) partition({{thread}});
    });
    count_lanes();
    write();
  }

 private:
  FP_HOST_DEVICE void read_lengths() {
    const bool has_waves = may_have_waves(given_.schedule);
    Request* const requests = work_.requests;
    const bool any_falls = threads_.any([&](i32 thread) {
      const Tables& tables = given_.tables;
      const i32 batch = tables.requests();
      bool falls = false;
      for (i32 i = thread; i < batch; i += num_threads) {
        falls = falls || tables.falls_at(i);
        requests[i] = tables.request(i, tables.rows(i), given_.heads, given_.schedule.tile_q);
      }
      if (thread != num_threads - 1) return falls;  // a thread that has no request in most batches
      work_.state->batch = batch;
      if (!has_waves) take_axis(one_wave(given_.schedule, given_.heads.num_kv_heads));
      return falls;
    });
    if (any_falls) order_rows();
    if (has_waves) find_waves();
    const i32 batch = work_.state->batch, num_full = work_.state->lanes.num_full();
    threads_.phase([&](i32 thread) {
      for (i32 i = thread; i < batch; i += num_threads) {
        requests[i].cost = cost_on_axis(given_.model, work_.state->axis.heads, requests[i]);
      }
      for (i32 i = thread; i < num_full; i += num_threads) work_.state->lanes.write_full(i, work_.lanes);
    });
  }

  // A request begins at the largest entry so far.
  FP_HOST_DEVICE void order_rows() {
    const Tables& tables = given_.tables;
    exclusive_scan(
        threads_, work_.state->batch, reinterpret_cast<LargestRow*>(work_.sums),
        [&](i32 i) { return LargestRow{tables.row_at(i + 1)}; },
        [&](i32 i, const LargestRow& before) {
          const i32 begin = max_of(tables.row_at(0), before.row);
          const RowRange rows{begin, max_of(begin, tables.row_at(i + 1))};
          work_.requests[i] = tables.request(i, rows, given_.heads, given_.schedule.tile_q);
        });
  }

  FP_HOST_DEVICE void find_waves() {
    Request* const requests = work_.requests;
    const i32 most_few = given_.model.most_few_rows;
    const KvTokens* all = exclusive_scan(
        threads_, work_.state->batch, reinterpret_cast<KvTokens*>(work_.sums),
        [&](i32 i) {
          const Request& request = requests[i];
          return KvTokens::of(request.tokens(), request.tiles, has_few_rows(request.q_len, most_few));
        },
        [](i32, const KvTokens&) {});
    threads_.phase([&](i32 thread) {
      if (thread != 0) return;
      take_axis(make_axis(given_.schedule, given_.heads.num_kv_heads, *all));
    });
  }

  FP_HOST_DEVICE void take_axis(const Axis& axis) {
    work_.state->axis = axis;
    work_.state->lanes = Lanes::make(given_.schedule, given_.heads.num_kv_heads, axis, work_.lanes);
  }

  // Places the requests on the cost axis.
  FP_HOST_DEVICE void lay_out() {
    Request* const requests = work_.requests;
    const i32 batch = work_.state->batch;
    const AxisSum* all = exclusive_scan(
        threads_, batch, reinterpret_cast<AxisSum*>(work_.sums),
        [&](i32 i) { return AxisSum{requests[i].cost, requests[i].tiles, requests[i].tiles > 0}; },
        [&](i32 i, const AxisSum& before) {
          requests[i].cost = before.cost;
          requests[i].number = before.requests;
        });
    threads_.phase([&](i32 thread) {
      if (thread != 0) return;
      requests[batch] = {};
      requests[batch].cost = all->cost;
      requests[batch].number = all->requests;
      work_.state->all = *all;
    });
  }

  FP_HOST_DEVICE void partition(const WarpSearcher<typename Threads::Vote>& searcher) {
    const i32 num_ctas = given_.schedule.num_ctas;
    const Partitioner partitioner(given_.model, given_.rules, division(), searcher);
    const Start start = partitioner.early_waves(work_.segments, work_.early_loads);
    const Partition found = partitioner.last_wave(start, work_.ends, work_.ends + num_ctas);
    if (searcher.writes()) work_.state->partition = found;
  }

  FP_HOST_DEVICE void count_lanes() {
    const i32 count = work_.state->lanes.count, waves = work_.state->axis.waves;
    each(threads_, count, [&](i32 lane) {
      work_.segments[lane * waves + waves - 1] = work_.state->partition.segment(lane);
      const Assignment assigned = assignment();
      const PlanMemory plan = memory();
      Totals own{};
      Writer(given_.model, given_.schedule, assigned, plan).add_lane<Items::none>(lane, own);
      work_.before[lane] = own;
    });
    const Totals* all = exclusive_scan(
        threads_, count, work_.sums, [&](i32 lane) { return work_.before[lane]; },
        [&](i32 lane, const Totals& before) { work_.before[lane] = before; });
    threads_.phase([&](i32 thread) {
      if (thread == 0) work_.before[count] = *all;
    });
  }

  FP_HOST_DEVICE void write() {
    const i32 count = work_.state->lanes.count, num_units = static_cast<i32>(work_.before[count].units);
    const Assignment assigned = assignment();
    const PlanMemory plan = memory();
    const Writer writer(given_.model, given_.schedule, assigned, plan);
    threads_.phase([&](i32 thread) {
      if (!given_.schedule.fixed()) {
        by_warps(thread, count, [&](i32 lane, i32 first, i32 step) {
          Totals before = work_.before[lane];
          writer.template add_lane<Items::whole_requests>(lane, before, first, step);
        });
      }
      for (i32 lane = thread; lane < count; lane += num_threads) {
        Totals before = work_.before[lane];
        writer.template add_lane<Items::others>(lane, before);
      }
    });
    threads_.phase([&](i32 thread) {
      by_warps(thread, count, [&](i32 lane, i32 first, i32 step) { writer.write_starts(lane, first, step); });
      by_warps(thread, num_units, [&](i32 unit, i32 first, i32 step) { writer.write_merges(unit, first, step); });
      if (thread == num_threads - 1) *static_cast<PlanHeader*>(given_.plan) = writer.header();
    });
  }

  FP_HOST_DEVICE Division division() const {
    const Workspace::State& state = *work_.state;
    return {work_.requests, state.batch, state.axis, state.all.tiles * state.axis.heads, work_.lanes, state.lanes};
  }
  FP_HOST_DEVICE Assignment assignment() const { return {division(), work_.segments, 0, 0.0, 0.0}; }
  FP_HOST_DEVICE PlanMemory memory() const { return {work_.before, given_.units, static_cast<char*>(given_.plan)}; }

  Threads& threads_;
  const TablePlan& given_;
  const Workspace& work_;
};

}  // namespace flashpage::plan
