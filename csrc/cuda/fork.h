// A side stream that forks from the caller's stream and joins it within one run.
#pragma once
#include "cuda/driver.h"
#include "flashpage.h"

struct fp_fork {
  const flashpage::cuda::Driver* driver = nullptr;
  flashpage::cuda::Context context = nullptr;
  flashpage::cuda::Stream stream = nullptr;
  flashpage::cuda::Event begun = nullptr, done = nullptr;
};

// In a stream capture, the two calls become edges of the graph. The context must be current.
namespace flashpage::cuda {

// Later launches on the side stream begin when all earlier work of `stream` is done.
int32_t fork_from(const fp_fork& fork, Stream stream);
// Later work of `stream` also waits for the side stream.
int32_t join_into(const fp_fork& fork, Stream stream);

}  // namespace flashpage::cuda
