// The general tensor-core kernel: every GPU since Ampere. Persistent CTAs run the plan's work items.
#pragma once
#include "flashpage/kernels/few_rows_sm80.h"
#include "flashpage/kernels/many_rows_sm80.h"

namespace flashpage {

// Warps along the tokens where rows are few, along the rows where they are many.
template <class Traits>
struct AttentionSm80 {
  using Kernel = typename select_type<(Traits::warps_kv > 1), FewRows<Traits>, ManyRows<Traits>>::type;
  static constexpr int threads = Shape<Traits>::threads;

  // The place in the plan lives here too: in registers it would push out accumulators.
  struct Shared {
    typename Kernel::Shared tiles;
    UnitCursor cursor;
  };
  static constexpr int shared_bytes = sizeof(Shared);

  FP_DEVICE static void run(const AttentionParams& params, const VariantArgs& args) {
    extern __shared__ __align__(128) u8 memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    ptx::grid_dependency_wait();
    Kernel kernel(shared.tiles, params, args);
    if (threadIdx.x == 0) shared.cursor.start(params.plan, blockIdx.x);
    while (true) {
      // A unit ends with a barrier, so nobody still reads the last one.
      if (threadIdx.x == 0) shared.cursor.advance(params, Traits::tile_q);
      __syncthreads();
      if (shared.cursor.done) break;
      for (int pass = 0; pass < Shape<Traits>::value_passes; ++pass)
        kernel.run(shared.cursor.item, shared.cursor.unit, pass);
    }
    ptx::grid_dependency_launch();
  }
};

}  // namespace flashpage
