// The general tensor-core kernel: every GPU since Ampere. Persistent CTAs run the plan's work items.
#pragma once
#include "flashpage/kernels/few_rows_sm80.h"
#include "flashpage/kernels/many_rows_sm80.h"

namespace flashpage {

// Warps along the tokens where rows are few, along the rows where they are many.
template <class Traits>
struct AttentionSm80 {
  using Kernel = typename select_type<(Traits::warps_kv > 1), FewRows<Traits>, ManyRows<Traits>>::type;
  using Shared = typename Kernel::Shared;
  static constexpr int threads = Shape<Traits>::threads;
  static constexpr int shared_bytes = sizeof(Shared);

  FP_DEVICE static void run(const AttentionParams& params, const VariantArgs& args) {
    extern __shared__ __align__(128) u8 memory[];
    ptx::grid_dependency_wait();
    Kernel kernel(*reinterpret_cast<Shared*>(memory), params, args);
    for_each_item(params.plan, [&](const WorkItem& item) {
      for_each_unit(params, item, Traits::tile_q, [&](const Unit& unit) {
        for (int pass = 0; pass < Shape<Traits>::value_passes; ++pass) kernel.run(item, unit, pass);
      });
    });
    ptx::grid_dependency_launch();
  }
};

}  // namespace flashpage
