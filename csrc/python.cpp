// The functions that Python calls without ctypes: tensors arrive as objects, which torch's DLPack functions read.
#include "python.h"

#include <algorithm>
#include <cstring>

namespace flashpage::host {

fp_python python;
const dlpack::ExchangeApi* torch_api;

namespace {

int32_t dtype_of(const dlpack::Tensor& tensor) {
  int32_t dtype;
  static_assert(sizeof(dtype) == sizeof(tensor.dtype));
  std::memcpy(&dtype, &tensor.dtype, sizeof(dtype));
  return dtype;
}

fp_tensor_form form_of(const dlpack::Tensor& tensor) {
  fp_tensor_form form{
      tensor.device.type, tensor.device.index, dtype_of(tensor), tensor.dims, {}, {}, bytes_of(tensor), nullptr, -1};
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
  void* scales[2];  // of K and V, or None
  void* q_tail;     // or None

  Arguments(void* const* given, intptr_t count)
      : run(pointer<fp_bound_run>(given[0])), q(given[1]), k(given[2]), v(given[3]), out(given[4]), lse(given[5]) {
    const auto optional = [&](intptr_t i) { return i < count ? given[i] : const_cast<void*>(python.none); };
    scales[0] = optional(7);
    scales[1] = optional(8);
    q_tail = optional(9);
  }
};

bool remember(void* object, fp_tensor_form& form) {
  form.dims = -1;
  form.bytes = 0;
  if (object == python.none) return true;
  dlpack::Tensor tensor;
  if (!read_tensor(object, tensor)) return false;
  form = form_of(tensor);
  return has_storage(object, tensor);
}

// The address of a tensor that fits `form`; null if it does not, or if the object is no plain tensor.
char* address(void* object, fp_tensor_form& form) {
  dlpack::Tensor tensor;
  if (!read_tensor(object, tensor) || !fits(tensor, form)) return nullptr;
  char* data = static_cast<char*>(tensor.data) + tensor.byte_offset;
  const int64_t storage = storage_bytes(object);
  if (data != form.last_data || storage != form.last_storage_bytes) {
    if (!is_inside(object, tensor, form.bytes, storage)) return nullptr;
    form.last_data = data;
    form.last_storage_bytes = storage;
  }
  return data;
}

bool overlap(const char* a, int64_t a_bytes, const char* b, int64_t b_bytes) {
  return a < b + b_bytes && b < a + a_bytes;
}

// Whether q's tail, or that there is none, fits the bound structs; q is at `q`.
bool tail_fits(const Arguments& given, const char* q) {
  fp_bound_run& run = *given.run;
  if (given.q_tail == python.none) return run.q_tail.dims < 0;
  return address(given.q_tail, run.q_tail) == q + run.q_tail_offset;
}

// The addresses of the scales that a run has; false if they do not fit the bound structs.
bool scale_addresses(const Arguments& given, char* (&found)[2]) {
  fp_tensor_form* forms[] = {&given.run->key_scales, &given.run->value_scales};
  for (int i = 0; i < 2; ++i) {
    if (given.scales[i] == python.none) {
      if (forms[i]->dims >= 0) return false;
      continue;
    }
    found[i] = address(given.scales[i], *forms[i]);
    if (found[i] == nullptr || (reinterpret_cast<intptr_t>(found[i]) & given.run->scale_masks[i]) != 0) return false;
  }
  return true;
}

// Whether what is written may share memory with what is read, or with each other.
bool writes_what_it_reads(const fp_bound_run& run, const char* q, const char* k, const char* v,
                          char* const (&scales)[2], const char* out, const char* lse) {
  const int64_t q_bytes = std::max(run.q.bytes, run.q_tail_offset + run.q_tail.bytes);
  const auto is_read = [&](const char* written, int64_t bytes) {
    return overlap(written, bytes, q, q_bytes) || overlap(written, bytes, k, run.k.bytes) ||
           overlap(written, bytes, v, run.v.bytes) || overlap(written, bytes, scales[0], run.key_scales.bytes) ||
           overlap(written, bytes, scales[1], run.value_scales.bytes);
  };
  if (is_read(out, run.out.bytes)) return true;
  return lse != nullptr && (is_read(lse, run.lse.bytes) || overlap(out, run.out.bytes, lse, run.lse.bytes));
}

// Tells autograd that a tensor was written. Tensors of inference mode have no version.
void count_write(const void* object) {
  const void* tensor = at_tensor(object);
  if (!python.is_inference(tensor)) python.bump_version(tensor);
}

// Sets the tensors' addresses in the structs; returns false if the tensors do not fit the bound structs.
bool point(const Arguments& given) {
  fp_bound_run& run = *given.run;
  char* q = address(given.q, run.q);
  char* out = q == nullptr || !tail_fits(given, q) ? nullptr : address(given.out, run.out);
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
  const auto is_off = [&](const char* pointer, int i) {
    return (reinterpret_cast<intptr_t>(pointer) & run.alignment_masks[i]) != 0;
  };
  if (v == nullptr || is_off(q, 0) || is_off(k, 1) || is_off(v, 2) || is_off(out, 3)) return false;
  char* scales[2] = {};
  if (!scale_addresses(given, scales) || writes_what_it_reads(run, q, k, v, scales, out, lse)) return false;
  fp_point(&run, q, k, v, out, lse);
  for (int i = 0; i < run.num_parts; ++i) {
    run.parts[i].key_scales->data = scales[0];
    run.parts[i].value_scales->data = scales[1];
  }
  count_write(given.out);
  if (lse != nullptr) count_write(given.lse);
  return true;
}

int32_t run_bound(const Arguments& given, void* stream) {
  if (!point(given)) return FP_OTHER_TENSORS;
  given.run->args->stream = stream;
  // The CPU works here, and a launch may wait for space in its queue.
  return without_interpreter([&] { return fp_run(given.run->args); });
}

int32_t bind(const Arguments& given) {
  fp_bound_run& run = *given.run;
  const bool all = remember(given.q, run.q) && remember(given.q_tail, run.q_tail) && remember(given.k, run.k) &&
                   remember(given.v, run.v) && remember(given.out, run.out) && remember(given.lse, run.lse) &&
                   remember(given.scales[0], run.key_scales) && remember(given.scales[1], run.value_scales);
  if (!all) run.q.dims = -1;  // fits no tensor
  run.q_tail_offset = 0;
  if (all && given.q_tail != python.none) {
    run.q_tail_offset = address(given.q_tail, run.q_tail) - address(given.q, run.q);
  }
  if (!all || !point(given)) return FP_OTHER_TENSORS;
  return FP_OK;
}

}  // namespace
}  // namespace flashpage::host

using namespace flashpage;

int32_t fp_python_set(const fp_python* given) {
  host::python = *given;
  const auto* api = static_cast<const dlpack::ExchangeApi*>(given->tensors);
  if (api == nullptr || api->header.major != dlpack::major_version) return FP_OTHER_TENSORS;
  if (given->tensor_offset <= 0 || given->bump_version == nullptr) return FP_OTHER_TENSORS;
  host::torch_api = api;
  return FP_OK;
}

void* fp_py_bind(void*, void* const* arguments, intptr_t count) {
  return host::to_int(host::bind(host::Arguments(arguments, count)));
}

void* fp_py_judge(void*, void* const* arguments, intptr_t count) {
  for (intptr_t i = 0; i < count; ++i) {
    dlpack::Tensor tensor;
    if (!host::read_tensor(arguments[i], tensor) || !host::has_storage(arguments[i], tensor)) {
      return host::to_int(FP_OTHER_TENSORS);
    }
  }
  return host::to_int(FP_OK);
}

void* fp_py_run(void*, void* const* arguments, intptr_t count) {
  return host::to_int(host::run_bound(host::Arguments(arguments, count), host::pointer<void>(arguments[6])));
}
