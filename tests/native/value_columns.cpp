// The kernel that transposes V, on the host, for tests/kernels/test_prefill_kernel.py, which sets TRAITS: the name of
// the file with the rendered Variant and Traits.
#include "flashpage/kernels/helpers/value_columns.h"

#include "flashpage/params/variant.h"
#include "hopper.h"

namespace flashpage {
#include TRAITS
}  // namespace flashpage

using namespace flashpage;

extern "C" void value_columns(const ValueColumnsParams* params) {
  using Kernel = ValueColumnsCopy<Traits>;
  card::launch(3, Kernel::threads, [&] { Kernel::run(*params); });
}
