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

// Returns false if the object is not a tensor in memory.
inline bool read_tensor(void* object, dlpack::Tensor& tensor) {
  if (torch_api->tensor_from_python(object, &tensor) != 0) {
    python.err_clear();
    return false;
  }
  return tensor.data != nullptr && tensor.dims <= max_dims;
}

}  // namespace flashpage::host
