// A side stream that leaves the caller's stream and comes back to it within one run.
#pragma once
#include "cuda/driver.h"
#include "flashpage.h"

struct fp_fork {
  const flashpage::cuda::Driver* driver = nullptr;
  flashpage::cuda::Context context = nullptr;
  flashpage::cuda::Stream stream = nullptr;
  flashpage::cuda::Event begun = nullptr, done = nullptr;
};

// Both calls may stand in a stream capture, where they become edges of the graph. The context must be current.
namespace flashpage::cuda {

// What is launched on the side stream from now on begins when all that `stream` has been given is done.
int32_t fork_from(const fp_fork& fork, Stream stream);
// What `stream` is given from now on begins when the side stream is done too.
int32_t join_into(const fp_fork& fork, Stream stream);

}  // namespace flashpage::cuda
