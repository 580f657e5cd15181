// Python objects as seen by the functions that Python calls directly (fp_py_*).
#pragma once
#include "dlpack.h"
#include "flashpage.h"

namespace flashpage::host {

constexpr int32_t max_dims = 5;

extern fp_python python;  // set once, before any fp_py_* is called
extern const dlpack::ExchangeApi* torch_api;

inline void* to_int(int64_t number) { return python.long_from_long(number); }

template <class T>
T* pointer(void* integer) {
  return static_cast<T*>(python.long_as_void_ptr(integer));
}

// Calls `work` with the interpreter released, so that other threads can run Python. At the end of the process, CPython
// before 3.14 ends a daemon thread that takes the interpreter again, by unwinding its stack. A destructor may not be
// unwound and would abort the process, so that this is a function.
template <class Work>
int32_t without_interpreter(Work&& work) {
  void* thread = python.eval_save_thread();
  const int32_t status = work();
  python.eval_restore_thread(thread);
  return status;
}

// The at::Tensor of an object of class torch.Tensor.
inline const void* at_tensor(const void* object) { return static_cast<const char*>(object) + python.tensor_offset; }

// Bytes from a tensor's first element to the end of its last one; 0 if it has no elements.
inline int64_t bytes_of(const dlpack::Tensor& tensor) {
  int64_t last = 0;
  for (int32_t i = 0; i < tensor.dims; ++i) {
    if (tensor.shape[i] == 0) return 0;
    last += (tensor.shape[i] - 1) * tensor.strides[i];
  }
  return (last + 1) * tensor.dtype.bits / 8;
}

// Bytes of a tensor's storage; -1 if it has none.
inline int64_t storage_bytes(const void* object) {
  int64_t found = 0;
  return python.storage_bytes(at_tensor(object), &found) == 0 ? found : -1;
}

// Whether a storage of that size holds the tensor's `bytes`, which may begin at an offset: it can be resized under a
// tensor.
inline bool is_inside(const void* object, const dlpack::Tensor& tensor, int64_t bytes, int64_t storage) {
  int64_t offset = 0;
  if (storage < 0 || python.storage_offset(at_tensor(object), &offset) != 0) return false;
  return bytes == 0 || storage >= offset * (tensor.dtype.bits / 8) + bytes;
}
inline bool has_storage(const void* object, const dlpack::Tensor& tensor) {
  return is_inside(object, tensor, bytes_of(tensor), storage_bytes(object));
}

// Returns false if the object is not a plain tensor: not a tensor, a subclass, one without memory, one whose values
// torch negates when it reads them, or one that requires a gradient. flashpage/base/checks.py has an error for each.
inline bool read_tensor(void* object, dlpack::Tensor& tensor) {
  struct Object {  // CPython's PyObject
    intptr_t references;
    const void* type;
  };
  if (static_cast<const Object*>(object)->type != python.tensor_class) return false;
  if (torch_api->tensor_from_python(object, &tensor) != 0) {
    python.err_clear();
    return false;
  }
  if (tensor.data == nullptr || tensor.dims > max_dims) return false;
  const void* found = at_tensor(object);
  if (python.is_negative(found)) return false;
  return !(python.requires_grad(*static_cast<const void* const*>(found)) && python.is_grad_enabled());
}

}  // namespace flashpage::host
