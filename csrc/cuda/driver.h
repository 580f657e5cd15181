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
  CurrentContext(const Driver& driver, Context context) : driver_(driver), result_(driver.ctx_get_current(&before_)) {
    if (result_ != success || before_ == context) return;
    refused_ = Driver::ctx_set_current_symbol;
    result_ = driver.ctx_set_current(context);
    changed_ = result_ == success;
  }
  ~CurrentContext() {
    if (changed_) driver_.ctx_set_current(before_);
  }
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

  // FP_OK, or the driver's error if it refused the change.
  int32_t status() const { return result_ == success ? FP_OK : fail(result_, refused_); }

 private:
  const Driver& driver_;
  Context before_ = nullptr;
  Result result_;
  const char* refused_ = Driver::ctx_get_current_symbol;
  bool changed_ = false;
};

// Allows this thread calls (allocations, event queries) that would fail and break a capture in global mode anywhere in
// the process. They must not touch a stream that is being captured.
class RelaxedCapture {
 public:
  explicit RelaxedCapture(const Driver& driver)
      : driver_(driver), changed_(driver.thread_exchange_capture_mode(&mode_) == success) {}
  ~RelaxedCapture() {
    if (changed_) driver_.thread_exchange_capture_mode(&mode_);
  }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  const Driver& driver_;
  int mode_ = capture_mode_relaxed;  // the thread's own mode between the two exchanges
  bool changed_;  // false: the driver refused; the thread keeps its mode, and a capture may refuse later calls
};

}  // namespace flashpage::cuda
