// The general tensor-core kernel, for every GPU since Ampere. Persistent CTAs run the plan's work items.
#pragma once
#include "flashpage/kernels/attention_sm80/few_rows.h"
#include "flashpage/kernels/attention_sm80/latent_rows.h"
#include "flashpage/kernels/attention_sm80/many_rows.h"
#include "flashpage/kernels/fitting_stages.h"

namespace flashpage {

// Warps along the tokens alone: few rows.
template <class Traits>
inline constexpr bool has_few_rows = Traits::warps_kv > 1 && Traits::warps_q == 1;

// Warps along the tokens if rows are few, along the rows if they are many; latent rows have a loop of their own.
template <class Traits>
using KvWarps = typename select_type<has_few_rows<Traits>, FewRows<Traits>, ManyRows<Traits>>::type;
template <class Traits>
using WarpsAlong = typename select_type<is_latent<Traits::kv_source>, LatentAttention<Traits>, KvWarps<Traits>>::type;

// Places are in shared memory, because in registers they would displace accumulators. While one place is computed the
// next one is written; the third is the one before, whose rows may not be written yet.
template <class Traits>
struct AttentionSm80Shared {
  typename WarpsAlong<Traits>::Shared tiles;
  PlaceCursor cursor;
  Place places[3];
};

template <class Traits>
struct AttentionSm80Fits {
  static constexpr bool value =
      Traits::shared_limit == 0 || sizeof(AttentionSm80Shared<Traits>) <= Traits::shared_limit;
};

// If rows are few and Traits::stages is not one, there are as many stages as fit Traits::ring_bytes and
// Traits::shared_limit, from two to Traits::stages.
template <class Given>
struct AttentionSm80 {
  static constexpr int in_flight = stages_in_flight<Given>(Given::tile_kv);
  static constexpr int fitting = fitting_stages<AttentionSm80Fits, Given, in_flight, 1, 2>();
  using Traits = WithStages<Given, (has_few_rows<Given> && Given::stages > 1) ? fitting : Given::stages>;
  using Kernel = WarpsAlong<Traits>;
  using Shared = AttentionSm80Shared<Traits>;
  static constexpr int threads = Shape<Traits>::threads;
  static constexpr int ctas_per_sm = Traits::ctas_per_sm, cluster_rows = 0;
  static constexpr int shared_bytes = sizeof(Shared);

  FP_DEVICE static void run(const AttentionParams& params, const VariantArgs& args) {
    extern __shared__ __align__(128) u8 memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    ptx::grid_dependency_wait();
    Kernel kernel(shared.tiles, params, args);
    if (threadIdx.x == 0) {
      shared.cursor.start(params.plan, blockIdx.x);
      shared.cursor.first(params, Traits::tile_q, shared.places[0]);
    }
    __syncthreads();
    if (!shared.places[0].done) {
      kernel.begin(shared.places[0]);
      i32 here = 0;
      do {
        if (threadIdx.x == 0)
          shared.cursor.next(params, Traits::tile_q, Shape<Traits>::value_passes, shared.places[here],
                             shared.places[next_place(here)]);
        kernel.run(shared.places, here);
        here = next_place(here);
      } while (!shared.places[here].done);
    }
    ptx::grid_dependency_launch();
  }
};

}  // namespace flashpage
