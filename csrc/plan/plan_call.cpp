// One call for each plan: reads the tensors of a batch, checks that the chosen kernels still fit it, and plans.
#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

#include "cpu/cpu_features.h"
#include "errors.h"
#include "plan/contexts.h"
#include "plan/slots.h"
#include "plan/typical_rows.h"
#include "python.h"

namespace flashpage::host {
namespace {

// ---------------------------------------------------------------- the batch

int64_t number(const fp_index_array& array, int64_t i) {
  return array.is_int64 ? static_cast<const int64_t*>(array.data)[i] : static_cast<const int32_t*>(array.data)[i];
}

template <class T>
void copy_numbers(const dlpack::Tensor& from, void* to) {
  const T* numbers = reinterpret_cast<const T*>(static_cast<const char*>(from.data) + from.byte_offset);
  const int64_t count = from.shape[0], stride = from.strides[0];
  if (stride == 1) {
    std::memcpy(to, numbers, count * sizeof(T));
  } else {
    for (int64_t i = 0; i < count; ++i) static_cast<T*>(to)[i] = numbers[i * stride];
  }
}

// Returns false if the object is not a tensor of numbers in one dimension.
bool read_numbers(void* object, dlpack::Tensor& tensor) {
  return read_tensor(object, tensor) && tensor.dims == 1 && tensor.dtype.code == dlpack::signed_integer &&
         (tensor.dtype.bits == 32 || tensor.dtype.bits == 64) && has_storage(object, tensor);
}

void copy_lengths(const dlpack::Tensor& tensor, char* copy, fp_index_array& array) {
  array = {copy, 1, tensor.dtype.bits == 64, static_cast<int32_t>(tensor.shape[0])};
  array.is_int64 ? copy_numbers<int64_t>(tensor, copy) : copy_numbers<int32_t>(tensor, copy);
}

// The rows of the requests with the fewest and the most. Written without branches, so that it vectorises.
template <class T>
void find_extremes(const T* ends, int64_t requests, fp_batch& batch) {
  using Count = std::make_unsigned_t<T>;
  Count least = 0, most = 0;  // least holds rows - 1, so that 0 rows wrap to the maximum
  --least;
  for (int64_t i = 0; i < requests; ++i) {
    const Count rows = static_cast<Count>(ends[i + 1]) - static_cast<Count>(ends[i]);
    least = std::min<Count>(least, rows - 1);
    most = std::max(most, rows);
  }
  batch.most_rows = static_cast<int64_t>(most);
  batch.least_rows = most > 0 ? static_cast<int64_t>(least + 1) : 0;
}

// Copies the lengths; returns false if a tensor is not on the host, missing or of the wrong size (see fp_py_plan).
bool take_lengths(fp_batch& batch, void* const* tensors) {
  fp_index_array* const arrays[] = {&batch.q_indptr, &batch.kv_indptr, &batch.last_page_len, &batch.kv_lens};
  const int64_t most = batch.bytes_of_a_copy / static_cast<int64_t>(sizeof(int64_t)) - 1;
  int64_t requests = -1;
  for (int i = 0; i < 4; ++i) {
    arrays[i]->data = nullptr;
    if (tensors[i] == python.none) continue;
    dlpack::Tensor tensor;
    if (!read_numbers(tensors[i], tensor) || tensor.device.type != dlpack::cpu) return false;
    if (requests < 0) requests = tensor.shape[0] - 1;  // the first one is an indptr, which has one more entry
    if (requests < 0 || requests > most || tensor.shape[0] != requests + (i < 2)) return false;
    copy_lengths(tensor, batch.copies + i * batch.bytes_of_a_copy, *arrays[i]);
  }
  if (batch.kv_indptr.data == nullptr || (batch.q_indptr.data == nullptr && batch.q_len_per_request == 0)) return false;
  batch.requests = static_cast<int32_t>(requests);
  return true;
}

// Whether nothing gives the tokens of the requests' last pages.
bool lacks_tokens(const fp_plan_call& call) {
  const fp_batch& batch = *call.batch;
  return call.problem.page_size > 1 && batch.last_page_len.data == nullptr && batch.kv_lens.data == nullptr &&
         !batch.has_full_pages;
}

// From one entry of an indptr to another. Entries beyond 31 bits are errors that the planner reports.
int64_t count_between(int64_t begin, int64_t end) {
  const auto bounded = [](int64_t entry) { return std::clamp<int64_t>(entry, -1, int64_t{1} << 31); };
  return std::max<int64_t>(0, bounded(end) - bounded(begin));
}

// Computes the sums over the lengths.
void sum_up(fp_batch& batch) {
  batch.kv_begin = number(batch.kv_indptr, 0);
  batch.kv_end = number(batch.kv_indptr, batch.requests);
  batch.least_rows = batch.most_rows = 0;
  batch.rows = 0;
  batch.rows_end = static_cast<int64_t>(batch.requests) * batch.q_len_per_request;
  const fp_index_array& ends = batch.q_indptr;
  if (ends.data == nullptr) return;
  batch.rows_end = number(ends, batch.requests);
  batch.rows = count_between(number(ends, 0), batch.rows_end);
  if (ends.is_int64) {
    find_extremes(static_cast<const int64_t*>(ends.data), batch.requests, batch);
  } else {
    find_extremes(static_cast<const int32_t*>(ends.data), batch.requests, batch);
  }
}

// Returns the largest page number; -1 if there is none, below -1 if one is negative or has more than 31 bits. Copies
// the numbers if `is_copied`. Written so that the compiler vectorises it.
template <class T, bool is_copied>
[[gnu::always_inline]] inline int32_t look_at(const T* __restrict numbers, int64_t count, int32_t* __restrict copies) {
  T beyond = 0;
  int32_t most = -1;
  for (int64_t i = 0; i < count; ++i) {
    const int32_t number = static_cast<int32_t>(numbers[i]);
    if constexpr (is_copied) copies[i] = number;
    beyond |= numbers[i] >> 31;
    most = number > most ? number : most;
  }
  return beyond != 0 ? -2 : most;
}

template <class T, bool is_copied>
[[gnu::noinline]] int32_t look_at_baseline(const T* numbers, int64_t count, int32_t* copies) {
  return look_at<T, is_copied>(numbers, count, copies);
}
#if defined(__x86_64__)
template <class T, bool is_copied>
[[gnu::noinline, gnu::target("avx2")]] int32_t look_at_avx2(const T* numbers, int64_t count, int32_t* copies) {
  return look_at<T, is_copied>(numbers, count, copies);
}
#endif
template <class T, bool is_copied>
int32_t largest_page(const T* numbers, int64_t count, int32_t* copies) {
#if defined(__x86_64__)  // whose baseline has no maximum of int32
  if (cpu_features().avx2) return look_at_avx2<T, is_copied>(numbers, count, copies);
#endif
  return look_at_baseline<T, is_copied>(numbers, count, copies);
}

int32_t largest_page(const dlpack::Tensor& tensor, const fp_batch& batch, int32_t* copies) {
  const char* data = static_cast<const char*>(tensor.data) + tensor.byte_offset;
  const int64_t begin = batch.kv_begin, count = batch.kv_end - begin;
  if (tensor.dtype.bits == 64)
    return largest_page<int64_t, true>(reinterpret_cast<const int64_t*>(data) + begin, count, copies + begin);
  const int32_t* numbers = reinterpret_cast<const int32_t*>(data) + begin;
  return copies != nullptr ? largest_page<int32_t, true>(numbers, count, copies + begin)
                           : largest_page<int32_t, false>(numbers, count, nullptr);
}

// Returns false if the page numbers can neither be read in place nor copied, or if they must be checked first. Numbers
// of 64 bits are read from the copies.
bool take_page_numbers(fp_batch& batch, void* object) {
  dlpack::Tensor tensor;
  const bool is_read = read_numbers(object, tensor) && tensor.shape[0] >= batch.kv_end && tensor.strides[0] == 1;
  if (!is_read || batch.checks_pages) return false;
  const bool is_on_host = tensor.device.type == dlpack::cpu, is_cpu = batch.device_type == dlpack::cpu;
  const bool is_copied = is_cpu || tensor.dtype.bits == 64;
  const char* data = static_cast<const char*>(tensor.data) + tensor.byte_offset;
  const int32_t* numbers = tensor.dtype.bits == 64 ? batch.page_copies : reinterpret_cast<const int32_t*>(data);
  const bool is_for_buffer = batch.page_buffer != nullptr && numbers != batch.page_buffer;
  if (is_for_buffer) {
    const bool has_way = is_cpu || batch.page_slots != nullptr;
    if (!is_on_host || !has_way || batch.kv_end > batch.page_buffer_entries) return false;
  } else if (tensor.device.type != batch.device_type || tensor.device.index != batch.device_index) {
    return false;
  }
  if (is_copied && (!is_on_host || batch.kv_end > batch.most_page_copies)) return false;
  batch.max_page = -1;
  if (is_on_host && batch.kv_begin >= 0 && batch.kv_begin < batch.kv_end) {
    batch.max_page = largest_page(tensor, batch, is_copied ? batch.page_copies : nullptr);
    if (batch.max_page < -1) return false;
  }
  const int32_t* read_in_place = batch.page_buffer != nullptr ? batch.page_buffer : numbers;
  batch.page_numbers = is_cpu ? batch.page_copies : read_in_place;
  if (is_for_buffer && batch.kv_end > 0) batch.page_source = numbers;
  return true;
}

// Copies the page numbers that were taken to the memory that captured launches read.
int32_t copy_page_numbers(fp_batch& batch, void* stream) {
  const int32_t* const numbers = std::exchange(batch.page_source, nullptr);
  if (numbers == nullptr) return FP_OK;
  const int64_t bytes = batch.kv_end * static_cast<int64_t>(sizeof(int32_t));
  if (batch.page_slots != nullptr) return fp_slots_copy(batch.page_slots, numbers, bytes, batch.page_buffer, stream);
  std::memmove(batch.page_buffer, numbers, bytes);
  return FP_OK;
}

// ---------------------------------------------------------------- choice of kernels

int64_t average(int64_t requests, int64_t rows) { return requests > 0 ? ceil_div(rows, requests) : 1; }

bool holds(const fp_row_class& rows, int64_t typical) { return rows.least <= typical && typical <= rows.most; }

int64_t typical_rows(const fp_plan_call& call) {
  const fp_batch& batch = *call.batch;
  const bool is_even = batch.least_rows == batch.most_rows || batch.q_indptr.data == nullptr;
  if (!call.weighs_rows || is_even || batch.row_runs != nullptr) return average(batch.requests, batch.rows);
  TypicalRows typical(call.problem);
  for (int32_t i = 0; i < batch.requests; ++i) {
    typical.add(rows_of_request(call.problem, i), visible_of_request(call.problem, i));
  }
  return typical.rows();
}

bool has_few_and_many(const fp_plan_call& call) {
  const fp_batch& batch = *call.batch;
  return call.parts != nullptr && batch.least_rows <= call.parts->most_few_rows &&
         call.parts->most_few_rows < batch.most_rows;
}

// The lengths of a call's batch.
struct PlannedLengths {
  const fp_plan_call& call;

  int64_t group() const { return call.context_table->group; }
  template <class Body>
  void each(Body&& body) const {
    if (call.batch->q_indptr.data != nullptr) each_request(call.problem, body);
  }
};

// Whether a row of the table may fit the batch, by what is known without reading its lengths again. Decode fits none.
bool may_have_class(const fp_context_table& table, const fp_batch& batch) {
  return std::any_of(table.rows, table.rows + table.count, [&](const fp_context_row& row) {
    return batch.rows <= row.most_rows && static_cast<double>(batch.most_rows) >= row.least_rows_of_request &&
           (batch.least_rows == batch.most_rows || !row.has_equal_rows);
  });
}

int32_t contexts_of_batch(const fp_plan_call& call) {
  const fp_context_table& table = *call.context_table;
  return may_have_class(table, *call.batch) ? contexts_of(table, PlannedLengths{call}) : 0;
}

// Whether the kernels that were chosen for an earlier batch also serve this one.
bool is_for(fp_plan_call& call) {
  fp_batch& batch = *call.batch;
  batch.typical_rows = typical_rows(call);
  if (!holds(call.row_class, batch.typical_rows)) return false;
  const double rows = static_cast<double>(batch.rows);
  if (rows >= std::min(call.gathered_rows_of_request * batch.requests, call.gathered_rows)) return false;
  if (call.contexts >= 0 && contexts_of_batch(call) != call.contexts) return false;
  if (!has_few_and_many(call)) return true;
  fp_parts& parts = *call.parts;
  fp_parts_count(&call.problem, &parts);
  return holds(call.few_class, parts.few_typical_rows) &&
         holds(call.many_class, average(parts.many_requests, parts.many_rows));
}

int32_t write_plan(fp_plan_call& call, bool is_chosen) {
  const fp_batch& batch = *call.batch;
  fp_problem& problem = call.problem;
  problem.batch = batch.requests;
  problem.q_indptr = batch.q_indptr;
  problem.kv_indptr = batch.kv_indptr;
  problem.last_page_len = batch.last_page_len;
  problem.kv_lens = batch.kv_lens;
  problem.row_runs = batch.row_runs;
  problem.num_row_runs = batch.num_row_runs;
  call.made_parts = 0;
  const bool is_batch = batch.least_requests <= batch.requests && batch.requests <= batch.most_requests;
  call.exceeded = !is_batch                                ? FP_LIMIT_REQUESTS
                  : batch.rows_end > batch.most_total_rows ? FP_LIMIT_ROWS
                  : batch.kv_end > batch.most_entries      ? FP_LIMIT_ENTRIES
                                                           : 0;
  if (call.exceeded != 0) return FP_OVER_LIMIT;
  if (!is_chosen && !is_for(call)) return FP_OTHER_BATCH;
  if (has_few_and_many(call) && slots_plan_parts(call) == FP_OK) return FP_OK;
  return slots_plan(call);
}

int32_t publish(fp_plan_call& call, void* stream) {
  const int32_t status = slots_publish(call, stream);
  return status == FP_OK ? copy_page_numbers(*call.batch, stream) : status;
}

int32_t plan_batch(fp_plan_call& call, void* stream, bool is_chosen) noexcept {
  return guarded("fp_plan_batch", [&] {
    const int32_t status = write_plan(call, is_chosen);
    return status != FP_OK || call.batch->is_staged ? status : publish(call, stream);
  });
}

}  // namespace
}  // namespace flashpage::host

using namespace flashpage;

int32_t fp_contexts_of(const fp_context_table* table, int32_t requests, const int32_t* q_lens, const int32_t* kv_lens) {
  return host::contexts_of(*table, host::GivenLengths{*table, requests, q_lens, kv_lens});
}

int32_t fp_plan_contexts(const fp_plan_call* call) { return host::contexts_of_batch(*call); }

void fp_batch_sum_up(fp_batch* batch) { host::sum_up(*batch); }

int32_t fp_plan_batch(fp_plan_call* call, void* stream, int32_t is_chosen) {
  return host::plan_batch(*call, stream, is_chosen != 0);
}

int32_t fp_plan_publish(fp_plan_call* call, void* stream) {
  return host::guarded("fp_plan_publish", [&] { return host::publish(*call, stream); });
}

void* fp_py_plan(void*, void* const* arguments, intptr_t) {
  auto& call = *host::pointer<fp_plan_call>(arguments[0]);
  void* stream = host::pointer<void>(arguments[1]);
  fp_batch& batch = *call.batch;
  batch.page_source = nullptr;
  if (!host::take_lengths(batch, arguments + 2) || host::lacks_tokens(call)) return host::to_int(FP_OTHER_TENSORS);
  host::sum_up(batch);
  if (batch.is_paged && !host::take_page_numbers(batch, arguments[6])) return host::to_int(FP_OTHER_PAGES);
  return host::to_int(host::without_interpreter([&] { return host::plan_batch(call, stream, false); }));
}
