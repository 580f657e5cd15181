// Fork and join by events: two launches of a run that execute at the same time.
#include "cuda/fork.h"

#include <limits>

using namespace flashpage;

namespace {

// The driver clamps it to its highest priority. If CTAs of both launches wait for SMs, those of the launch that was
// issued first are placed first.
constexpr int highest_priority = std::numeric_limits<int>::min();

int32_t make(fp_fork& fork) {
  const cuda::Driver& cuda = *fork.driver;
  FP_CUDA_TRY(stream_create_with_priority, &fork.stream, cuda::stream_non_blocking, highest_priority);
  FP_CUDA_TRY(event_create, &fork.begun, cuda::event_disable_timing);
  FP_CUDA_TRY(event_create, &fork.done, cuda::event_disable_timing);
  return FP_OK;
}

}  // namespace

int32_t cuda::fork_from(const fp_fork& fork, Stream stream) {
  const Driver& cuda = *fork.driver;
  FP_CUDA_TRY(event_record, fork.begun, stream);
  FP_CUDA_TRY(stream_wait_event, fork.stream, fork.begun, 0);
  return FP_OK;
}

int32_t cuda::join_into(const fp_fork& fork, Stream stream) {
  const Driver& cuda = *fork.driver;
  FP_CUDA_TRY(event_record, fork.done, fork.stream);
  FP_CUDA_TRY(stream_wait_event, stream, fork.done, 0);
  return FP_OK;
}

fp_fork* fp_fork_create(int32_t device) {
  fp_fork* fork = nullptr;
  const int32_t status = host::guarded("fp_fork_create", [&]() -> int32_t {
    fork = new fp_fork;
    fork->context = cuda::primary_context(device);
    if (fork->context == nullptr) return FP_CUDA_ERROR;
    fork->driver = cuda::driver();
    cuda::RelaxedCapture relaxed(*fork->driver);
    cuda::CurrentContext current(*fork->driver, fork->context);
    const int32_t is_current = current.status();
    return is_current == FP_OK ? make(*fork) : is_current;
  });
  if (status == FP_OK) return fork;
  fp_fork_destroy(fork);
  return nullptr;
}

// Work in flight still completes: the driver keeps what it needs.
void fp_fork_destroy(fp_fork* fork) {
  if (fork == nullptr) return;
  if (fork->driver != nullptr) {
    const cuda::Driver& cuda = *fork->driver;
    cuda::RelaxedCapture relaxed(cuda);
    cuda::CurrentContext current(cuda, fork->context);
    if (fork->begun != nullptr) cuda.event_destroy(fork->begun);
    if (fork->done != nullptr) cuda.event_destroy(fork->done);
    if (fork->stream != nullptr) cuda.stream_destroy(fork->stream);
  }
  delete fork;
}
