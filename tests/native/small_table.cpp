// The host library and kernels of the CPU without Python and torch: plans small batches, runs them on the pool and
// compares with attention in fp64. tests/support/arm_table.py builds it for 64-bit Arm, where qemu-user runs it.
//
//   small_table LIBRARY KERNEL ELEMENT HEAD_DIM PAGE_SIZE TILE_Q TILE_KV    (ELEMENT: 0 fp32, 1 fp16, 2 bf16)
#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "flashpage.h"

using namespace flashpage;

namespace {

#if defined(__aarch64__)
using Float16 = __fp16;
#else
using Float16 = _Float16;
#endif

constexpr int num_q_heads = 8, num_kv_heads = 2, group = num_q_heads / num_kv_heads;
constexpr int lengths[] = {1, 17, 300, 1100}, requests = std::size(lengths);
constexpr double tolerances[] = {2e-5, 2e-3, 1.5e-2};

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

// Elements of the type under test, in memory that is NaN where nothing was stored.
struct Tensor {
  int element;
  std::vector<char> bytes;

  Tensor(int element, size_t count) : element(element), bytes(count * size(), char(0xff)) {}
  int size() const { return element == 0 ? 4 : 2; }

  void store(size_t i, float value) {
    if (element == 0) std::memcpy(&bytes[4 * i], &value, 4);
    if (element == 1) {
      const Float16 half = static_cast<Float16>(value);
      std::memcpy(&bytes[2 * i], &half, 2);
    }
    if (element == 2) {
      u32 bits;
      std::memcpy(&bits, &value, 4);
      bits += 0x7fff + (bits >> 16 & 1);
      std::memcpy(&bytes[2 * i], reinterpret_cast<char*>(&bits) + 2, 2);
    }
  }
  double load(size_t i) const {
    if (element == 1) {
      Float16 half;
      std::memcpy(&half, &bytes[2 * i], 2);
      return static_cast<double>(half);
    }
    u32 bits = 0;
    std::memcpy(reinterpret_cast<char*>(&bits) + 4 - size(), &bytes[i * size()], size());
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
  }
  void fill(size_t begin, size_t count) {
    static u32 state = 1;
    for (size_t i = 0; i < count; ++i) {
      float sum = -6;  // of twelve uniform numbers: about normal
      for (int k = 0; k < 12; ++k) sum += static_cast<float>((state = state * 1664525u + 1013904223u) >> 8) / (1 << 24);
      store(begin + i, sum);
    }
  }
};

struct Case {
  int element, head_dim, page_size;  // page_size 0: ragged
  fp_schedule schedule;
  const fp_kernel* kernel;

  int page() const { return page_size ? page_size : 1; }
  size_t token(int at) const { return static_cast<size_t>(at) * num_kv_heads * head_dim; }

  // The largest error of out, and of lse in `worst_lse`, over requests of at most `most_rows` rows.
  double worst(int most_rows, bool causal, int window_left, double& worst_lse) const {
    std::vector<i32> q_indptr{0}, kv_indptr{0}, pages;
    std::vector<i32> kv_lens(lengths, lengths + requests);
    for (int length : lengths) {
      q_indptr.push_back(q_indptr.back() + std::min(most_rows, length));
      kv_indptr.push_back(kv_indptr.back() + (length + page() - 1) / page());
    }
    const int num_pages = kv_indptr.back(), rows = q_indptr.back();
    for (int i = 0; i < num_pages; ++i) pages.push_back(page_size ? (i * 11 + 3) % num_pages : i);
    if (page_size && num_pages % 11 == 0) std::puts("pages are no permutation"), std::exit(2);

    Tensor q(element, static_cast<size_t>(rows) * num_q_heads * head_dim), out = q;
    Tensor k(element, token(num_pages * page())), v = k;
    q.fill(0, q.bytes.size() / q.size());
    for (int r = 0; r < requests; ++r) {
      for (int t = 0; t < lengths[r]; ++t) {
        for (Tensor* kv : {&k, &v}) kv->fill(token(place(kv_indptr, pages, r, t)), token(1));
      }
    }
    std::vector<float> lse(static_cast<size_t>(rows) * num_q_heads, NAN);
    run(q, k, v, out, lse, q_indptr, kv_indptr, kv_lens, pages, causal, window_left);

    double worst = 0;
    worst_lse = 0;
    for (int r = 0; r < requests; ++r) {
      for (int row = q_indptr[r]; row < q_indptr[r + 1]; ++row) {
        const int position = lengths[r] - (q_indptr[r + 1] - row);
        const int end = causal ? position + 1 : lengths[r],
                  begin = window_left < 0 ? 0 : std::max(0, position - window_left);
        for (int head = 0; head < num_q_heads; ++head) {
          const size_t own = (static_cast<size_t>(row) * num_q_heads + head) * head_dim;
          std::vector<double> sum(head_dim);
          double total = 0;
          for (int t = begin; t < end; ++t) {
            const size_t at = token(place(kv_indptr, pages, r, t)) + head / group * head_dim;
            double score = 0;
            for (int d = 0; d < head_dim; ++d) score += q.load(own + d) * k.load(at + d);
            const double weight = std::exp(score / std::sqrt(head_dim));
            for (int d = 0; d < head_dim; ++d) sum[d] += weight * v.load(at + d);
            total += weight;
          }
          for (int d = 0; d < head_dim; ++d) worst = larger(worst, out.load(own + d) - sum[d] / total);
          worst_lse = larger(worst_lse, lse[static_cast<size_t>(row) * num_q_heads + head] - std::log2(total));
        }
      }
    }
    return worst;
  }

 private:
  static double larger(double worst, double error) {
    return std::abs(error) <= worst ? worst : std::abs(error);
  }  // NaN stays

  int place(const std::vector<i32>& kv_indptr, const std::vector<i32>& pages, int request, int token) const {
    return pages[kv_indptr[request] + token / page()] * page() + token % page();
  }

  void run(const Tensor& q, const Tensor& k, const Tensor& v, Tensor& out, std::vector<float>& lse,
           const std::vector<i32>& q_indptr, const std::vector<i32>& kv_indptr, const std::vector<i32>& kv_lens,
           const std::vector<i32>& pages, bool causal, int window_left) const {
    const auto array = [](const std::vector<i32>& of) { return fp_index_array{of.data(), 1, 0, int32_t(of.size())}; };
    fp_problem problem = {};
    problem.batch = requests, problem.page_size = page_size;
    problem.q_indptr = array(q_indptr), problem.kv_indptr = array(kv_indptr), problem.kv_lens = array(kv_lens);
    problem.num_q_heads = num_q_heads, problem.num_kv_heads = num_kv_heads;
    problem.visibility = {causal, window_left, 0};
    std::vector<char> plan(1 << 20);
    fp_plan_result planned;
    check(CALL(fp_plan)(&problem, &schedule, plan.data(), plan.size(), &planned));
    if (planned.num_merges == 0 && window_left < 0) std::puts("no unit is cut"), std::exit(2);

    std::vector<float> partial_out(size_t(planned.num_partial_rows) * head_dim, NAN),
        partial_lse(planned.num_partial_rows, NAN);
    const i64 head_stride = head_dim, token_stride = i64{num_kv_heads} * head_dim;
    AttentionParams params = {};
    params.q = q.bytes.data(), params.out = out.bytes.data(), params.lse = lse.data();
    params.q_row_stride = params.out_row_stride = i64{num_q_heads} * head_dim;
    params.q_head_stride = params.out_head_stride = head_dim;
    params.k = {k.bytes.data(), page() * token_stride, token_stride, head_stride};
    params.v = {v.bytes.data(), page() * token_stride, token_stride, head_stride};
    params.kv_indices = pages.data(), params.plan = reinterpret_cast<const PlanHeader*>(plan.data());
    params.partial_out = partial_out.data(), params.partial_lse = partial_lse.data();
    params.score_scale = static_cast<float>(1 / std::sqrt(head_dim)), params.value_scale = 1;
    params.num_q_heads = num_q_heads, params.num_kv_heads = num_kv_heads;
    params.causal = causal, params.window_left = window_left;
    params.rope_scale = params.rope_theta = 1;
    params.group = make_fast_div(group), params.page = make_fast_div(page());
    MergeParams merge = {params.plan,           params.partial_out,     params.partial_lse, params.out,  params.lse,
                         params.out_row_stride, params.out_head_stride, head_dim,           num_q_heads, params.group};
    fp_run_args args = {};
    args.launches[0] = {.kernel = kernel, .params = &params, .grid = planned.num_ctas};
    args.launches[1] = {.kernel = CALL(fp_cpu_merge_kernel)(element), .params = &merge, .grid = 1};
    args.count = 2;
    check(CALL(fp_run)(&args));
  }
};

}  // namespace

int main(int count, char** words) {
  if (count != 8) return std::puts("small_table LIBRARY KERNEL ELEMENT HEAD_DIM PAGE_SIZE TILE_Q TILE_KV"), 2;
  library = dlopen(words[1], RTLD_NOW);
  void* const loaded = dlopen(words[2], RTLD_NOW);
  if (library == nullptr || loaded == nullptr) return std::printf("%s\n", dlerror()), 2;
  const auto entry = reinterpret_cast<fp_cpu_function>(dlsym(loaded, "flashpage_cpu_attention"));
  Case a = {std::atoi(words[3]), std::atoi(words[4]), std::atoi(words[5]), {}, CALL(fp_kernel_from_function)(entry)};
  a.schedule = {.num_ctas = 6, .heads_on_axis = 1, .tile_q = std::atoi(words[6]), .tile_kv = std::atoi(words[7])};
  a.schedule.ns_per_token = 10, a.schedule.ns_per_unit = 50, a.schedule.few_rows_cost = 1, a.schedule.ns_per_piece = 60;
  a.schedule.merge_rows = 64, a.schedule.min_piece_tokens = 128;
  check(CALL(fp_cpu_set_threads)(2));

  int failed = 0;
  const auto show = [&](const char* name, int rows, bool causal, int window_left) {
    double lse, error = a.worst(rows, causal, window_left, lse);
    const bool is_right = error < tolerances[a.element] && lse < 2e-4;
    std::printf("element %d head_dim %d page %d %-8s out %.1e lse %.1e%s\n", a.element, a.head_dim, a.page_size, name,
                error, lse, is_right ? "" : "  WRONG");
    failed += !is_right;
  };
  show("decode", 1, true, -1);
  show("prefill", 40, true, -1);
  show("window", 20, true, 70);
  return failed;
}
