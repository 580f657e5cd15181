// append_quantised on the host, for tests/kernels/test_append_quantised.py, which sets TRAITS: the name of the file
// with the rendered Variant and Traits.
#include "flashpage/kernels/helpers/append_quantised.h"

#include "flashpage/params/variant.h"
#include "hopper.h"

namespace flashpage {
#include TRAITS
}  // namespace flashpage

using namespace flashpage;

// Returns how many threads would have ended the launch.
extern "C" int append_quantised(const AppendQuantisedParams* params) {
  using Kernel = AppendQuantised<Traits>;
  ptx::traps = 0;
  card::launch(2, Kernel::threads, [&] { Kernel::run(*params); });
  return ptx::traps;
}
