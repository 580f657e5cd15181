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

// Releases the interpreter during its lifetime, so that other threads can run Python.
class WithoutInterpreter {
 public:
  WithoutInterpreter() : thread_(python.eval_save_thread()) {}
  ~WithoutInterpreter() { python.eval_restore_thread(thread_); }
  WithoutInterpreter(const WithoutInterpreter&) = delete;
  WithoutInterpreter& operator=(const WithoutInterpreter&) = delete;

 private:
  void* thread_;
};

// Returns false if the object is not a tensor in memory.
inline bool read_tensor(void* object, dlpack::Tensor& tensor) {
  if (torch_api->tensor_from_python(object, &tensor) != 0) {
    python.err_clear();
    return false;
  }
  return tensor.data != nullptr && tensor.dims <= max_dims;
}

}  // namespace flashpage::host
