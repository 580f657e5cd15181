// The host library and kernels of the CPU without Python and torch: plans small batches, runs them on the pool and
// compares with attention in fp64. tests/support/arm_table.py builds it for 64-bit Arm, where qemu-user runs it.
//
//   small_table LIBRARY KERNEL QUERY KEYS VALUES QK_COLUMNS VALUE_COLUMNS PAGE_SIZE TILE_Q TILE_KV
//
// QUERY, KEYS, VALUES: names of table_rows.h; PAGE_SIZE 0: ragged. Values of latent rows are the first columns of keys.
#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "flashpage.h"
#include "table_rows.h"

using namespace flashpage;
using table::Kind, table::Rows;

namespace {

constexpr int num_q_heads = 8;
constexpr int lengths[] = {1, 17, 300, 1100}, requests = std::size(lengths);
constexpr double tolerances[] = {2e-5, 2e-3, 1.5e-2};  // of queries in fp32, fp16, bf16

void* library;

template <class Function>
Function* function(const char* name) {
  void* found = dlsym(library, name);
  if (found == nullptr) std::printf("%s\n", dlerror()), std::exit(2);
  return reinterpret_cast<Function*>(found);
}
#define CALL(name) function<decltype(name)>(#name)

void check(int32_t status) {
  if (status != FP_OK) std::printf("status %d: %s\n", status, CALL(fp_last_error)()), std::exit(2);
}

// Requests of at most `most_rows` rows, and their pages.
struct Batch {
  std::vector<i32> q_indptr{0}, kv_indptr{0}, kv_lens{std::begin(lengths), std::end(lengths)}, pages;
  bool causal;
  int window_left, page_size;

  Batch(int most_rows, bool causal, int window_left, int page_size)
      : causal(causal), window_left(window_left), page_size(page_size) {
    for (int length : lengths) {
      q_indptr.push_back(q_indptr.back() + std::min(most_rows, length));
      kv_indptr.push_back(kv_indptr.back() + (length + page() - 1) / page());
    }
    for (int i = 0; i < num_pages(); ++i) pages.push_back(page_size ? (i * 11 + 3) % num_pages() : i);
    if (page_size && num_pages() % 11 == 0) std::puts("pages are no permutation"), std::exit(2);
  }
  int page() const { return page_size ? page_size : 1; }
  int num_pages() const { return kv_indptr.back(); }
  int rows() const { return q_indptr.back(); }
  // The place of a token in the cache.
  int place(int request, int token) const {
    return pages[kv_indptr[request] + token / page()] * page() + token % page();
  }
};

struct Errors {
  double out = 0, lse = 0;
};
void widen(double& worst, double error) { worst = std::abs(error) <= worst ? worst : std::abs(error); }  // NaN stays

struct Case {
  Kind query, keys, values;
  int columns, value_columns, page_size;
  fp_schedule schedule;
  const fp_kernel* kernel;

  bool is_latent() const { return table::is_latent(keys); }
  int num_kv_heads() const { return is_latent() ? 1 : 2; }
  int group() const { return num_q_heads / num_kv_heads(); }

  Errors worst(const Batch& batch) const {
    Rows q(query, columns, batch.rows() * num_q_heads), out(query, value_columns, batch.rows() * num_q_heads);
    const int places = batch.num_pages() * batch.page();
    Rows k(keys, columns, places * num_kv_heads(), batch.page()), v = k;
    if (!is_latent()) v = Rows(values, value_columns, places * num_kv_heads(), batch.page());
    for (int row = 0; row < batch.rows() * num_q_heads; ++row) q.fill(row);
    for (int r = 0; r < requests; ++r)
      for (int i = 0; i < lengths[r] * num_kv_heads(); ++i) {
        const int row = batch.place(r, i / num_kv_heads()) * num_kv_heads() + i % num_kv_heads();
        k.fill(row);
        if (!is_latent()) v.fill(row);
      }
    std::vector<float> lse(size_t(batch.rows()) * num_q_heads, NAN);
    run(batch, q, k, v, out, lse);
    return compare(batch, q, k, v, out, lse);
  }

 private:
  Errors compare(const Batch& batch, const Rows& q, const Rows& k, const Rows& v, const Rows& out,
                 const std::vector<float>& lse) const {
    const std::vector<double> queries = q.values(), keys = k.values(), values = v.values(), found = out.values();
    Errors worst;
    for (int r = 0; r < requests; ++r)
      for (int row = batch.q_indptr[r]; row < batch.q_indptr[r + 1]; ++row)
        for (int head = 0; head < num_q_heads; ++head) {
          const int own = row * num_q_heads + head, position = lengths[r] - (batch.q_indptr[r + 1] - row);
          const int end = batch.causal ? position + 1 : lengths[r];
          const int begin = batch.window_left < 0 ? 0 : std::max(0, position - batch.window_left);
          std::vector<double> sum(value_columns);
          double total = 0;
          for (int t = begin; t < end; ++t) {
            const size_t at = batch.place(r, t) * num_kv_heads() + head / group();
            const double* const key = &keys[at * columns];
            const double* const value = is_latent() ? key : &values[at * value_columns];
            double score = 0;
            for (int d = 0; d < columns; ++d) score += queries[size_t(own) * columns + d] * key[d];
            const double weight = std::exp(score * score_scale());
            for (int d = 0; d < value_columns; ++d) sum[d] += weight * value[d];
            total += weight;
          }
          for (int d = 0; d < value_columns; ++d)
            widen(worst.out, found[size_t(own) * value_columns + d] - sum[d] / total);
          widen(worst.lse, lse[own] - std::log2(total));
        }
    return worst;
  }

  double score_scale() const { return 1 / std::sqrt(columns); }

  void run(const Batch& batch, const Rows& q, const Rows& k, const Rows& v, Rows& out, std::vector<float>& lse) const {
    const auto array = [](const std::vector<i32>& of) { return fp_index_array{of.data(), 1, 0, int32_t(of.size())}; };
    fp_problem problem = {};
    problem.batch = requests, problem.page_size = page_size;
    problem.q_indptr = array(batch.q_indptr), problem.kv_indptr = array(batch.kv_indptr);
    problem.kv_lens = array(batch.kv_lens);
    problem.num_q_heads = num_q_heads, problem.num_kv_heads = num_kv_heads();
    problem.visibility = {batch.causal, batch.window_left, 0};
    std::vector<char> plan(1 << 20);
    fp_plan_result planned;
    check(CALL(fp_plan)(&problem, &schedule, plan.data(), plan.size(), &planned));
    if (planned.num_merges == 0 && batch.window_left < 0) std::puts("no unit is cut"), std::exit(2);

    std::vector<float> partial_out(size_t(planned.num_partial_rows) * value_columns, NAN),
        partial_lse(planned.num_partial_rows, NAN);
    AttentionParams params = {};
    params.q = q.data(), params.out = out.data(), params.lse = lse.data();
    params.q_row_stride = i64{num_q_heads} * columns, params.q_head_stride = columns;
    params.out_row_stride = i64{num_q_heads} * value_columns, params.out_head_stride = value_columns;
    params.k = k.view(num_kv_heads()), params.v = is_latent() ? k.tails() : v.view(num_kv_heads());
    params.key_scales = k.scales_view(num_kv_heads());
    if (!is_latent()) params.value_scales = v.scales_view(num_kv_heads());
    if (const float* scales = k.scales_of_tokens()) params.k_scale = scales, params.k_scale_stride = 1;
    params.kv_indices = batch.pages.data(), params.plan = reinterpret_cast<const PlanHeader*>(plan.data());
    params.partial_out = partial_out.data(), params.partial_lse = partial_lse.data();
    params.score_scale = float(score_scale()), params.value_scale = params.tail_scale = 1;
    params.num_q_heads = num_q_heads, params.num_kv_heads = num_kv_heads();
    params.causal = batch.causal, params.window_left = batch.window_left;
    params.rope_scale = params.rope_theta = 1;
    params.group = make_fast_div(group()), params.page = make_fast_div(batch.page());
    MergeParams merge = {params.plan,           params.partial_out,     params.partial_lse, params.out,  params.lse,
                         params.out_row_stride, params.out_head_stride, value_columns,      num_q_heads, params.group};
    fp_run_args args = {};
    args.launches[0] = {.kernel = kernel, .params = &params, .grid = planned.num_ctas};
    args.launches[1] = {.kernel = CALL(fp_cpu_merge_kernel)(int(query)), .params = &merge, .grid = 1};
    args.count = 2;
    check(CALL(fp_run)(&args));
  }
};

}  // namespace

int main(int count, char** words) {
  if (count != 11) return std::puts("see the first lines of small_table.cpp"), 2;
  library = dlopen(words[1], RTLD_NOW);
  void* const loaded = dlopen(words[2], RTLD_NOW);
  if (library == nullptr || loaded == nullptr) return std::printf("%s\n", dlerror()), 2;
  const auto entry = reinterpret_cast<fp_cpu_function>(dlsym(loaded, "flashpage_cpu_attention"));
  Case a = {table::kind_of(words[3]), table::kind_of(words[4]), table::kind_of(words[5]),
            std::atoi(words[6]),      std::atoi(words[7]),      std::atoi(words[8])};
  a.kernel = CALL(fp_kernel_from_function)(entry);
  a.schedule = {.num_ctas = 6, .heads_on_axis = 1, .tile_q = std::atoi(words[9]), .tile_kv = std::atoi(words[10])};
  a.schedule.ns_per_token = 10, a.schedule.ns_per_unit = 50, a.schedule.few_rows_cost = 1, a.schedule.ns_per_piece = 60;
  a.schedule.merge_rows = 64, a.schedule.min_piece_tokens = 128;
  check(CALL(fp_cpu_set_threads)(2));

  int failed = 0;
  const auto show = [&](const char* name, int rows, bool causal, int window_left) {
    const Errors worst = a.worst(Batch(rows, causal, window_left, a.page_size));
    const bool is_right = worst.out < tolerances[int(a.query)] && worst.lse < 2e-4;
    std::printf("%s q, %s and %s, %d/%d columns, page %d: %-8s out %.1e lse %.1e%s\n", words[3], words[4], words[5],
                a.columns, a.value_columns, a.page_size, name, worst.out, worst.lse, is_right ? "" : "  WRONG");
    failed += !is_right;
  };
  show("decode", 1, true, -1);
  if (a.is_latent()) return show("drafts", 3, true, -1), failed;  // fp64 takes seconds in an emulator
  if (a.query == a.keys) show("prefill", 40, true, -1);
  show("window", 20, true, 70);
  return failed;
}
