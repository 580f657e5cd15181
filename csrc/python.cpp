// What Python calls without ctypes in between: tensors arrive as objects, and torch's DLPack functions read them.
#include <algorithm>
#include <cstring>
#include <type_traits>

#include "dlpack.h"
#include "errors.h"
#include "plan/slots.h"

namespace flashpage::host {
namespace {

constexpr int32_t max_dims = 5;

fp_python python;
const dlpack::ExchangeApi* torch_api;

void* to_int(int64_t number) { return python.long_from_long(number); }

template <class T>
T* pointer(void* integer) {
  return static_cast<T*>(python.long_as_void_ptr(integer));
}

// Lets other threads run Python for as long as it lives.
class WithoutInterpreter {
 public:
  WithoutInterpreter() : thread_(python.eval_save_thread()) {}
  ~WithoutInterpreter() { python.eval_restore_thread(thread_); }
  WithoutInterpreter(const WithoutInterpreter&) = delete;
  WithoutInterpreter& operator=(const WithoutInterpreter&) = delete;

 private:
  void* thread_;
};

// False where the object is no tensor of memory.
bool read_tensor(void* object, dlpack::Tensor& tensor) {
  if (torch_api->tensor_from_python(object, &tensor) != 0) {
    python.err_clear();
    return false;
  }
  return tensor.data != nullptr && tensor.dims <= max_dims;
}

int32_t dtype_of(const dlpack::Tensor& tensor) {
  int32_t dtype;
  static_assert(sizeof(dtype) == sizeof(tensor.dtype));
  std::memcpy(&dtype, &tensor.dtype, sizeof(dtype));
  return dtype;
}

fp_tensor_form form_of(const dlpack::Tensor& tensor) {
  fp_tensor_form form{tensor.device.type, tensor.device.index, dtype_of(tensor), tensor.dims, {}, {}};
  for (int32_t i = 0; i < tensor.dims; ++i) {
    form.shape[i] = tensor.shape[i];
    form.strides[i] = tensor.strides[i];
  }
  return form;
}

bool fits(const dlpack::Tensor& tensor, const fp_tensor_form& form) {
  bool same = tensor.device.type == form.device_type && tensor.device.index == form.device_index &&
              dtype_of(tensor) == form.dtype && tensor.dims == form.dims;
  for (int32_t i = 0; same && i < form.dims; ++i) {
    same = tensor.shape[i] == form.shape[i] && tensor.strides[i] == form.strides[i];
  }
  return same;
}

// The arguments of fp_py_bind and fp_py_run.
struct Arguments {
  fp_bound_run* run;
  void *q, *k, *v, *out, *lse;

  explicit Arguments(void* const* given)
      : run(pointer<fp_bound_run>(given[0])), q(given[1]), k(given[2]), v(given[3]), out(given[4]), lse(given[5]) {}
};

bool remember(void* object, fp_tensor_form& form) {
  form.dims = -1;
  if (object == python.none) return true;
  dlpack::Tensor tensor;
  if (!read_tensor(object, tensor)) return false;
  form = form_of(tensor);
  return true;
}

// The address of a tensor that fits; null where it does not, or where the object is no tensor.
char* address(void* object, const fp_tensor_form& form) {
  dlpack::Tensor tensor;
  if (!read_tensor(object, tensor) || !fits(tensor, form)) return nullptr;
  return static_cast<char*>(tensor.data) + tensor.byte_offset;
}

// Points the structs at the tensors; false where they are not those that the structs were bound to.
bool point(const Arguments& given) {
  fp_bound_run& run = *given.run;
  char* q = address(given.q, run.q);
  char* out = q == nullptr ? nullptr : address(given.out, run.out);
  char* k = out == nullptr ? nullptr : address(given.k, run.k);
  if (k == nullptr) return false;
  char* v = nullptr;
  if (given.v != python.none) {
    v = address(given.v, run.v);
  } else if (run.v.dims < 0) {
    v = k + run.v_offset;
  }
  char* lse = nullptr;
  if (given.lse != python.none) {
    lse = address(given.lse, run.lse);
    if (lse == nullptr) return false;
  }
  const auto bits = [](char* pointer) { return reinterpret_cast<intptr_t>(pointer); };
  if (v == nullptr || ((bits(q) | bits(k) | bits(v) | bits(out)) & run.alignment_mask) != 0) return false;
  run.params->q = q;
  run.k_view->data = k;
  run.v_view->data = v;
  run.params->out = run.merge_params->out = out;
  run.params->lse = run.merge_params->lse = reinterpret_cast<float*>(lse);
  return true;
}

int32_t run_bound(const Arguments& given, void* stream) {
  if (!point(given)) return FP_OTHER_TENSORS;
  given.run->args->stream = stream;
  WithoutInterpreter others;  // the CPU works here, and a launch can wait for room
  return fp_run(given.run->args);
}

int32_t bind(const Arguments& given) {
  fp_bound_run& run = *given.run;
  const bool all = remember(given.q, run.q) && remember(given.k, run.k) && remember(given.v, run.v) &&
                   remember(given.out, run.out) && remember(given.lse, run.lse);
  if (!all) run.q.dims = -1;  // fits no tensor
  return all ? FP_OK : FP_OTHER_TENSORS;
}

// See fp_py_page_numbers.
int64_t page_numbers(void* object, int32_t device_type, int32_t device_index, int64_t entries) {
  dlpack::Tensor tensor;
  const bool is_fit = read_tensor(object, tensor) && tensor.device.type == device_type &&
                      tensor.device.index == device_index && tensor.dims == 1 && tensor.shape[0] >= entries &&
                      tensor.strides[0] == 1 && tensor.dtype.code == dlpack::signed_integer && tensor.dtype.bits == 32;
  return is_fit ? reinterpret_cast<intptr_t>(tensor.data) + static_cast<int64_t>(tensor.byte_offset) : 0;
}

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

// False where the object is no host tensor of numbers.
bool read_numbers(void* object, dlpack::Tensor& tensor) {
  return read_tensor(object, tensor) && tensor.device.type == dlpack::cpu && tensor.dims == 1 &&
         tensor.dtype.code == dlpack::signed_integer && (tensor.dtype.bits == 32 || tensor.dtype.bits == 64);
}

void copy_lengths(const dlpack::Tensor& tensor, char* copy, fp_index_array& array) {
  array = {copy, 1, tensor.dtype.bits == 64, static_cast<int32_t>(tensor.shape[0])};
  array.is_int64 ? copy_numbers<int64_t>(tensor, copy) : copy_numbers<int32_t>(tensor, copy);
}

// Rows of the requests that have the fewest and the most. Without branches, for vector registers.
template <class T>
void find_extremes(const T* ends, int64_t requests, fp_lengths& to) {
  using Count = std::make_unsigned_t<T>;
  Count least = 0, most = 0;  // the former less one: no rows are then the most that there can be
  --least;
  for (int64_t i = 0; i < requests; ++i) {
    const Count rows = static_cast<Count>(ends[i + 1]) - static_cast<Count>(ends[i]);
    least = std::min<Count>(least, rows - 1);
    most = std::max(most, rows);
  }
  to.most_rows = static_cast<int64_t>(most);
  to.least_rows = most > 0 ? static_cast<int64_t>(least) + 1 : 0;
}

void find_extremes(fp_lengths& to) {
  const fp_index_array& rows = to.problem->q_indptr;
  to.least_rows = to.most_rows = 0;
  if (rows.data == nullptr) return;
  if (rows.is_int64) return find_extremes(static_cast<const int64_t*>(rows.data), rows.length - 1, to);
  find_extremes(static_cast<const int32_t*>(rows.data), rows.length - 1, to);
}

// The rows of the batch; -1: see fp_py_lengths.
int64_t take_lengths(fp_lengths& to, void* const* tensors) {
  fp_problem& problem = *to.problem;
  fp_index_array* const arrays[] = {&problem.q_indptr, &problem.kv_indptr, &problem.last_page_len, &problem.kv_lens};
  const int64_t most = to.bytes_of_a_copy / static_cast<int64_t>(sizeof(int64_t)) - 1;
  int64_t batch = -1;
  for (int i = 0; i < 4; ++i) {
    arrays[i]->data = nullptr;
    if (tensors[i] == python.none) continue;
    dlpack::Tensor tensor;
    if (!read_numbers(tensors[i], tensor)) return -1;
    if (batch < 0) batch = tensor.shape[0] - 1;  // the first one is an indptr, which has one entry more
    if (batch < 0 || batch > most || tensor.shape[0] != batch + (i < 2)) return -1;
    copy_lengths(tensor, to.copies + i * to.bytes_of_a_copy, *arrays[i]);
  }
  const bool knows_rows = problem.q_indptr.data != nullptr || problem.q_len_per_request > 0;
  if (problem.kv_indptr.data == nullptr || !knows_rows) return -1;
  problem.batch = static_cast<int32_t>(batch);
  to.kv_begin = number(problem.kv_indptr, 0);
  to.kv_end = number(problem.kv_indptr, batch);
  find_extremes(to);
  if (problem.q_indptr.data == nullptr) return 0;
  const int64_t rows = number(problem.q_indptr, batch) - number(problem.q_indptr, 0);
  return rows > 0 ? rows : 0;  // less is an error that the planner tells
}

}  // namespace
}  // namespace flashpage::host

using namespace flashpage;

int32_t fp_python_set(const fp_python* given) {
  host::python = *given;
  const auto* api = static_cast<const dlpack::ExchangeApi*>(given->tensors);
  if (api == nullptr || api->header.major != dlpack::major_version) return FP_OTHER_TENSORS;
  host::torch_api = api;
  return FP_OK;
}

void* fp_py_bind(void*, void* const* arguments, intptr_t) {
  return host::to_int(host::bind(host::Arguments(arguments)));
}

void* fp_py_run(void*, void* const* arguments, intptr_t) {
  return host::to_int(host::run_bound(host::Arguments(arguments), host::pointer<void>(arguments[6])));
}

void* fp_py_lengths(void*, void* const* arguments, intptr_t) {
  auto* lengths = host::pointer<fp_lengths>(arguments[0]);
  return host::to_int(host::take_lengths(*lengths, arguments + 1));
}

void* fp_py_page_numbers(void*, void* const* arguments, intptr_t) {
  const auto number = [&](int i) { return reinterpret_cast<intptr_t>(host::pointer<void>(arguments[i])); };
  return host::to_int(
      host::page_numbers(arguments[0], static_cast<int32_t>(number(1)), static_cast<int32_t>(number(2)), number(3)));
}

void* fp_py_slots_plan(void*, void* const* arguments, intptr_t) {
  const auto* call = host::pointer<fp_slots_call>(arguments[0]);
  const auto* schedule = host::pointer<fp_schedule>(arguments[1]);
  void* stream = host::pointer<void>(arguments[2]);
  int32_t status;
  {
    host::WithoutInterpreter others;
    status =
        fp_slots_plan(call->slots, call->problem, schedule, call->destination, call->capacity, stream, call->result);
  }
  return host::to_int(status);
}

void* fp_py_slots_plan_parts(void*, void* const* arguments, intptr_t) {
  const auto* call = host::pointer<fp_slots_call>(arguments[0]);
  auto* parts = host::pointer<fp_parts>(arguments[1]);
  void* stream = host::pointer<void>(arguments[2]);
  int32_t status;
  {
    host::WithoutInterpreter others;
    status = host::slots_plan_parts(*call, *parts, stream);
  }
  return host::to_int(status);
}
