// The kernel that widens pages, on the host, for tests/kernels/test_widen_pages.py, which sets TRAITS: the name of the
// file with the rendered Variant and Traits.
#include "flashpage/kernels/helpers/widen_pages.h"

#include "flashpage/params/variant.h"
#include "hopper.h"

namespace flashpage {
#include TRAITS
}  // namespace flashpage

using namespace flashpage;

extern "C" void widen_pages(const WidenPagesParams* params) {
  using Kernel = WidenPages<Traits>;
  card::launch(2, Kernel::threads, [&] { Kernel::run(*params); });
}
