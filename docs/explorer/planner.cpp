// The planner in a browser: four functions for docs/explorer/explorer.js, which reads and writes the module's memory,
// call the sources of the host library. docs/explorer/build.py compiles it to WebAssembly.
#include "plan/planner.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <queue>
#include <vector>

#include "flashpage/plan/cost.h"
#include "plan/contexts.h"

#define EXPORTED extern "C" __attribute__((used, visibility("default")))

using namespace flashpage;

namespace {

struct Batch {
  std::vector<int32_t> rows, pages, tokens;  // rows and pages: sums before each request
};

// Work items in the order of CTAs, as columns; the page of a plan draws the same ones (flashpage/plan/report/page.py).
struct Columns {
  std::vector<int32_t> first, request, kv_head, num_units, first_packed_row, kv_begin, kv_end, piece;
  std::vector<float> start, end;

  void add(const WorkItem& item, double begins, double ends) {
    request.push_back(item.request), kv_head.push_back(item.kv_head), num_units.push_back(item.num_units);
    first_packed_row.push_back(item.first_packed_row);
    kv_begin.push_back(item.kv_begin), kv_end.push_back(item.kv_end);
    piece.push_back(item.partial_row >= 0 ? item.piece : -1);
    start.push_back(static_cast<float>(begins)), end.push_back(static_cast<float>(ends));
  }
};

// Read by explorer.js: numbers, then addresses of the columns, in the order of its lists.
struct View {
  int32_t status, num_ctas, num_items, num_merges, num_partial_rows, num_units, pieces;
  const void* columns[10];
};

Batch batch;
Columns columns;
View view;
int32_t page_size;
plan::Heads heads;
std::vector<char> plan_bytes;

// The prices of single pieces. In a fixed split the planner spreads the price of a cut over tokens.
plan::CostModel prices(fp_schedule schedule) {
  schedule.fixed_piece_tokens = 0;
  return {heads, schedule};
}

// Nanoseconds of one unit over tokens [begin, end), and of all units of an item.
double unit_cost(const plan::CostModel& model, const plan::Request& request, int32_t tile, int32_t begin, int32_t end,
                 double ns_per_unit) {
  const TokenRange seen = model.visible(request, tile);
  const int32_t tokens = max_of(0, min_of(end, seen.end) - max_of(begin, seen.begin));
  const double ns = ns_per_unit + model.price(request).ns * tokens;
  const bool is_only = request.tiles == 1 && tokens == seen.size();
  return is_only ? max_of(ns, model.least_ns_of_unit) : ns;
}

double item_cost(const plan::CostModel& model, const fp_schedule& schedule, const WorkItem& item) {
  plan::Request request = {};
  request.q_len = item.q_len, request.kv_len = item.kv_len;
  request.tiles = ceil_div(item.q_len * heads.group(), schedule.tile_q);
  const double ns_per_unit = item.piece > 0 ? schedule.ns_per_piece : schedule.ns_per_unit;
  double cost = 0.0;
  for (int32_t u = 0; u < item.num_units; ++u) {
    const int32_t tile = (item.first_packed_row / schedule.tile_q + u) % request.tiles;
    cost += unit_cost(model, request, tile, item.kv_begin, item.kv_end, ns_per_unit);
  }
  return cost;
}

const View* show(int32_t status, int32_t num_ctas) {
  view.status = status, view.num_ctas = num_ctas, view.num_items = static_cast<int32_t>(columns.request.size());
  const void* found[] = {columns.first.data(),
                         columns.start.data(),
                         columns.end.data(),
                         columns.request.data(),
                         columns.kv_head.data(),
                         columns.num_units.data(),
                         columns.first_packed_row.data(),
                         columns.kv_begin.data(),
                         columns.kv_end.data(),
                         columns.piece.data()};
  std::copy(std::begin(found), std::end(found), view.columns);
  return &view;
}

int32_t rows_of(int32_t request) { return batch.rows[request + 1] - batch.rows[request]; }

}  // namespace

EXPORTED void* explorer_memory(int32_t bytes) { return std::malloc(bytes); }

// Takes a batch: rows and tokens of each request, [requests]. Returns the class of its contexts by the table.
EXPORTED int32_t explorer_batch(const fp_context_table* table, int32_t requests, const int32_t* rows,
                                const int32_t* tokens, int32_t num_q_heads, int32_t num_kv_heads, int32_t causal,
                                int32_t tokens_of_page) {
  batch = {{0}, {0}, {tokens, tokens + requests}};
  page_size = tokens_of_page;
  heads = {num_q_heads, num_kv_heads, {causal, -1, 0}};
  for (int32_t i = 0; i < requests; ++i) {
    batch.rows.push_back(batch.rows.back() + rows[i]);
    batch.pages.push_back(batch.pages.back() + ceil_div(tokens[i], page_size));
  }
  return host::contexts_of(*table, host::GivenLengths{*table, requests, rows, tokens});
}

// Plans the batch.
EXPORTED const View* explorer_plan(const fp_schedule* schedule) {
  const auto array = [](const std::vector<int32_t>& entries) {
    return fp_index_array{entries.data(), 1, 0, static_cast<int32_t>(entries.size())};
  };
  fp_problem problem = {};
  problem.batch = static_cast<int32_t>(batch.tokens.size());
  problem.q_indptr = array(batch.rows), problem.kv_indptr = array(batch.pages), problem.kv_lens = array(batch.tokens);
  problem.page_size = page_size;
  problem.num_q_heads = heads.num_q_heads, problem.num_kv_heads = heads.num_kv_heads;
  problem.visibility = heads.visibility;

  columns = {};
  fp_plan_result result;
  int32_t status;
  plan_bytes.resize(1 << 16);
  while (true) {
    status = fp_plan(&problem, schedule, plan_bytes.data(), static_cast<int64_t>(plan_bytes.size()), &result);
    if (status != FP_WORKSPACE_TOO_SMALL) break;
    plan_bytes.resize(result.used_bytes);
  }
  if (status != FP_OK) return show(status, 0);

  const plan::CostModel model = prices(*schedule);
  const auto* header = reinterpret_cast<const PlanHeader*>(plan_bytes.data());
  view.num_units = 0;
  for (int32_t cta = 0; cta < schedule->num_ctas; ++cta) {
    columns.first.push_back(static_cast<int32_t>(columns.request.size()));
    double at = 0.0;
    for_each_item(header, cta, [&](const WorkItem& item) {
      const double begins = at;
      at += item_cost(model, *schedule, item);
      columns.add(item, begins, at);
      view.num_units += item.num_units;
    });
  }
  columns.first.push_back(static_cast<int32_t>(columns.request.size()));
  view.num_merges = result.num_merges, view.num_partial_rows = result.num_partial_rows;
  return show(FP_OK, schedule->num_ctas);
}

// Plans the batch with a fixed split: each unit in `pieces` equal pieces (0: as many as fill the CTAs once), which the
// CTA that is free first takes in the order of a grid. The price of a piece is that of the planner's pieces.
EXPORTED const View* explorer_fixed(const fp_schedule* schedule, int32_t pieces) {
  const plan::CostModel model = prices(*schedule);
  const int32_t requests = static_cast<int32_t>(batch.tokens.size()), num_ctas = schedule->num_ctas;
  std::vector<plan::Request> all(requests);
  int32_t units = 0;
  for (int32_t i = 0; i < requests; ++i) {
    all[i].q_len = rows_of(i), all[i].kv_len = batch.tokens[i];
    all[i].tiles = ceil_div(all[i].q_len * heads.group(), schedule->tile_q);
    units += all[i].tiles * heads.num_kv_heads;
  }
  if (pieces == 0) pieces = units > 0 ? max_of(1, num_ctas / units) : 1;

  struct Placed {
    WorkItem item;
    double begins, ends;
  };
  std::vector<std::vector<Placed>> lanes(num_ctas);
  std::priority_queue<std::pair<double, int32_t>, std::vector<std::pair<double, int32_t>>, std::greater<>> free;
  for (int32_t cta = 0; cta < num_ctas; ++cta) free.push({0.0, cta});
  view.num_partial_rows = view.num_merges = 0;
  for (int32_t i = 0; i < requests; ++i) {
    for (int32_t head = 0; head < heads.num_kv_heads; ++head) {
      for (int32_t tile = 0; tile < all[i].tiles; ++tile) {
        const int32_t first = tile * schedule->tile_q;
        const int32_t rows = min_of(schedule->tile_q, all[i].q_len * heads.group() - first);
        const TokenRange seen = model.visible(all[i], tile);
        const int32_t step = round_up(ceil_div(max_of(seen.size(), 1), pieces), schedule->tile_kv);
        int32_t count = 0;
        for (int32_t begin = seen.begin; count == 0 || begin < seen.end; begin += step, ++count) {
          const int32_t end = min_of(seen.end, begin + step);
          WorkItem item = {};
          item.request = i, item.first_packed_row = first, item.kv_head = head, item.num_units = 1;
          item.kv_begin = begin, item.kv_end = end, item.piece = count;
          item.partial_row = step < seen.size() ? view.num_partial_rows + count * rows : -1;
          const auto [at, cta] = free.top();
          free.pop();
          const double ns = count > 0 ? schedule->ns_per_piece : schedule->ns_per_unit;
          lanes[cta].push_back({item, at, at + unit_cost(model, all[i], tile, begin, end, ns)});
          free.push({lanes[cta].back().ends, cta});
        }
        if (count > 1) view.num_partial_rows += count * rows, view.num_merges += ceil_div(rows, schedule->merge_rows);
      }
    }
  }
  columns = {};
  for (const auto& lane : lanes) {
    columns.first.push_back(static_cast<int32_t>(columns.request.size()));
    for (const Placed& placed : lane) columns.add(placed.item, placed.begins, placed.ends);
  }
  columns.first.push_back(static_cast<int32_t>(columns.request.size()));
  view.num_units = units, view.pieces = pieces;
  return show(FP_OK, num_ctas);
}
