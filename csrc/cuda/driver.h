// libcuda by dlopen: loaded at the first CUDA call, absent on machines without a driver.
#pragma once
#include "cuda/cuda_api.h"
#include "errors.h"

namespace flashpage::cuda {

struct Driver {
#define FP_CUDA_MEMBER(member, symbol, parameters) \
  Result(*member) parameters;                      \
  static constexpr const char* member##_symbol = #symbol;
  FP_CUDA_FUNCTIONS(FP_CUDA_MEMBER)
#undef FP_CUDA_MEMBER
};

// The driver, loaded and initialised; null if there is none (no_driver() then says why).
const Driver* driver();
const char* no_driver();

// The primary context of a device, retained once in a process and never released. Null after an error (fp_last_error is
// set).
Context primary_context(int device);

// Sets fp_last_error to "<what>: <CUDA's name and text>" and returns FP_CUDA_ERROR.
int32_t fail(Result result, const char* what);

// Calls a function of `cuda`, a Driver in scope. If it fails, returns from the caller with the function's name.
#define FP_CUDA_TRY(member, ...) \
  if (const auto try_result = cuda.member(__VA_ARGS__)) return flashpage::cuda::fail(try_result, cuda.member##_symbol)

// Makes `context` current on this thread during its lifetime.
class CurrentContext {
 public:
  CurrentContext(const Driver& driver, Context context) : driver_(driver) {
    driver_.ctx_get_current(&before_);
    changed_ = before_ != context;
    if (changed_) driver_.ctx_set_current(context);
  }
  ~CurrentContext() {
    if (changed_) driver_.ctx_set_current(before_);
  }
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

 private:
  const Driver& driver_;
  Context before_ = nullptr;
  bool changed_;
};

// Allows this thread calls (allocations, event queries) that would fail and break a capture in global mode anywhere in
// the process. They must not touch a stream that is being captured.
class RelaxedCapture {
 public:
  explicit RelaxedCapture(const Driver& driver) : driver_(driver) { driver_.thread_exchange_capture_mode(&mode_); }
  ~RelaxedCapture() { driver_.thread_exchange_capture_mode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  const Driver& driver_;
  int mode_ = capture_mode_relaxed;  // the thread's own mode between the two exchanges
};

}  // namespace flashpage::cuda
