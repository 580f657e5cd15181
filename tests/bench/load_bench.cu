// Reads the K and V of a plan with the decode kernel's own loaders and does nothing with them: the upper limit of
// decode. tests/bench/load_bench.py prepends #defines of HEAD_DIM, TOKENS, STAGES, CONSUMERS and LOADER.
#include "flashpage/ptx/fence.h"
#include "flashpage/ptx/griddepcontrol.h"
#include "flashpage/tile/layout/shape.h"
#include "flashpage/tile/layout/swizzled_rows.h"
#include "flashpage/tile/load/decode_boxes.h"
#include "flashpage/tile/load/decode_rows.h"

namespace flashpage {

struct Traits {
  using Cache = Bf16;
  static constexpr int head_dim_qk = HEAD_DIM, head_dim_vo = HEAD_DIM, tile_q = 16, stages = STAGES;
  static constexpr KvSource kv_source = KvSource::paged;
  static constexpr Loader loader = Loader::LOADER;
  static constexpr RowsLayout layout = RowsLayout::swizzled;
};

// The shared memory that loaders need.
struct Slots {
  static constexpr int tokens = TOKENS, loading_warps = 4;
  static constexpr int key_bytes = SwizzledRows<Traits::Cache, HEAD_DIM, TOKENS>::tile_bytes;
  alignas(1024) u8 slots[STAGES][2 * key_bytes];
  i32 pages_ahead[STAGES][TOKENS];
  SlotRing<STAGES> ring;
};

struct LoadBench {
  using SlotLoader =
      select_type<(Traits::loader == Loader::boxes), DecodeBoxes<Traits, Slots>, DecodeRows<Traits, Slots>>::type;
  static constexpr int consumers = CONSUMERS;  // warps; a slot always belongs to the same warp
  static constexpr int threads = 32 * (Slots::loading_warps + consumers);
  static_assert(STAGES % consumers == 0);

  Slots& shared;
  const AttentionParams& params;
  const SlotLoader loader;
  int warp = threadIdx.x / 32;

  FP_DEVICE LoadBench(Slots& shared, const AttentionParams& params, const KvMaps& maps)
      : shared(shared), params(params), loader(shared, params, maps) {}

  // Every warp goes through the same units and takes its own slots; the next unit is looked up while the ring is in
  // use.
  template <class Take>
  FP_DEVICE void walk(int own, int step, const Take& take) const {
    auto first_own = [&](u32 use) { return (own - static_cast<int>(use % step) + step) % step; };
    PlaceCursor cursor;
    cursor.start(params.plan, blockIdx.x);
    Place place, next;
    cursor.first(params, Traits::tile_q, place);
    u32 use = 0;
    typename SlotLoader::Source source, following;
    if (!place.done) source = loader.open(place, first_own(use));
    while (!place.done) {
      const int early = min_of(source.slots, STAGES);
      int slot = first_own(use);
      for (; slot < early; slot += step) take(source, slot, use + slot);
      cursor.next(params, Traits::tile_q, 1, place, next);
      if (!next.done) following = loader.open(next, first_own(use + source.slots));
      for (; slot < source.slots; slot += step) take(source, slot, use + slot);
      use += source.slots;
      place = next;
      source = following;
    }
  }

  FP_DEVICE void load() const {
    walk(warp, Slots::loading_warps, [&](auto& source, int slot, u32 use) { loader.load(source, slot, use); });
  }

  // Reads a slot and releases it. The sum is used, so that the compiler keeps the reads.
  FP_DEVICE void consume() const {
    u32 sum = 0;
    walk(warp - Slots::loading_warps, consumers, [&](auto&, int, u32 use) {
      shared.ring.wait_full(use);
      const uint4* data = reinterpret_cast<const uint4*>(shared.slots[shared.ring.slot(use)]);
      for (int i = threadIdx.x % 32; i < 2 * Slots::key_bytes / 16; i += 32) sum ^= data[i].x ^ data[i].w;
      __syncwarp();
      if (threadIdx.x % 32 == 0) shared.ring.release(use);
    });
    if (sum == 0x7fc1a5a5) static_cast<u32*>(params.out)[0] = sum;
  }
};

extern "C" __device__ const int flashpage_launch[3] = {LoadBench::threads, sizeof(Slots), 0};

extern "C" __global__ void __launch_bounds__(LoadBench::threads, 1)
    flashpage_load_bench(const __grid_constant__ AttentionParams params, const __grid_constant__ VariantArgs,
                         const __grid_constant__ KvMaps maps) {
  extern __shared__ __align__(1024) u8 memory[];
  Slots& shared = *reinterpret_cast<Slots*>(memory);
  shared.ring.init(LoadBench::SlotLoader::arrivals, 1);
  __syncthreads();
  ptx::grid_dependency_wait();
  const LoadBench bench(shared, params, maps);
  if (bench.warp < Slots::loading_warps) {
    bench.load();
  } else {
    bench.consume();
  }
}

}  // namespace flashpage
