// append_latent on the host, for tests/api/test_mla_append.py, which sets TRAITS: the name of the file with the
// rendered Variant and Traits.
#include "flashpage/kernels/helpers/append_latent.h"

#include "flashpage/params/variant.h"
#include "hopper.h"

namespace flashpage {
#include TRAITS
}  // namespace flashpage

using namespace flashpage;

extern "C" void append_latent(const AppendLatentParams* params) {
  using Kernel = AppendLatent<Traits>;
  card::launch(2, Kernel::threads, [&] { Kernel::run(*params); });
}
