// The kernel that rotates pages and q, on the host, for tests/kernels/test_rotate_pages.py, which sets TRAITS: the name
// of the file with the rendered Variant and Traits.
#include "flashpage/kernels/helpers/rotate_pages.h"

#include "flashpage/params/variant.h"
#include "hopper.h"

namespace flashpage {
#include TRAITS
}  // namespace flashpage

using namespace flashpage;

extern "C" void rotate_pages(const RotatePagesParams* params) {
  using Kernel = RotatePages<Traits>;
  card::launch(3, Kernel::threads, [&] { Kernel::run(*params); });
}
