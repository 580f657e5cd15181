// decode_sm90 on the host: loading and computing warps as fibers, mma.sync by the fragments of the PTX manual. For
// tests/kernels/test_decode_formats.py, which sets TRAITS: the name of the file with the rendered Variant and Traits,
// whose formats' headers come first.
#include "flashpage/kernels/decode_sm90/kernel.h"
#include "flashpage/params/variant.h"
#include "hopper.h"

namespace flashpage {
#include TRAITS
}  // namespace flashpage

using namespace flashpage;

// Runs the plan's CTAs one after another; before, each byte of shared memory is `fill`. Returns the number of barriers
// at which arrivals or bytes are missing.
extern "C" i32 run_decode(const AttentionParams* params, const VariantArgs* args, const hopper::Map* of_maps,
                          i32 num_ctas, i32 fill) {
  const KvMaps maps{};
  hopper::maps = {{&maps.k, of_maps[0]}, {&maps.v, of_maps[1]}};
  hopper::barriers.clear();
  card::meanwhile = hopper::land_some;
  std::memset(memory, fill, sizeof memory);
  using Kernel = DecodeSm90<Traits>;
  static_assert(Kernel::shared_bytes <= sizeof memory / 2);
  card::launch(num_ctas, Kernel::threads, [&] { Kernel::run(*params, *args, maps); }, 1);
  return static_cast<i32>(std::count_if(hopper::barriers.begin(), hopper::barriers.end(),
                                        [](const auto& at) { return at.second.arrived > 0 || at.second.bytes != 0; }));
}
