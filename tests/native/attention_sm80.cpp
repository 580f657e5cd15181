// attention_sm80 on the host: warps as fibers, mma.sync by the fragments of the PTX manual. For
// tests/kernels/test_latent_rows.py and test_many_rows.py, which set TRAITS: the name of the file with the rendered
// Variant and Traits.
#include "flashpage/kernels/attention_sm80/kernel.h"
#include "flashpage/params/variant.h"
#include "hopper.h"

namespace flashpage {
#include TRAITS
}  // namespace flashpage

using namespace flashpage;

// Runs the plan's CTAs one after another.
extern "C" void run_attention_sm80(const AttentionParams* params, const VariantArgs* args, i32 num_ctas) {
  std::memset(memory, 0x7f, sizeof memory);  // NaN
  using Kernel = AttentionSm80<Traits>;
  static_assert(Kernel::shared_bytes <= sizeof memory);
  card::launch(num_ctas, Kernel::threads, [&] { Kernel::run(*params, *args); });
}
