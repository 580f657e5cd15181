// Runs before the attention under a custom mask or a variant's mask function: finds which tiles are visible, and sorts
// the units by their number of visible tiles. Nothing is copied back to the host.
#pragma once
#include "flashpage/ptx/atomic.h"
#include "flashpage/ptx/griddepcontrol.h"
#include "flashpage/tile/mask/bit_tiles.h"
#include "flashpage/tile/mask/function_tiles.h"
#include "flashpage/tile/mask/mask_tiles.h"

namespace flashpage {

template <class Traits>
struct MaskTiles {
  using Classifier =
      typename select_type<Traits::mask_source == MaskSource::function, FunctionTiles<Traits>, BitTiles>::type;
  static constexpr int warps = 16;
  static constexpr int threads = 32 * warps;
  static constexpr int shared_bytes = 0, ctas_per_sm = 2, cluster_rows = 0;

  struct Shared {
    i32 found[threads];  // items that begin a request
    i32 num_found;       // number of these items; later of units
    TileWord found_by[warps];
    u32 places[count_classes];  // position in the queue of the next unit of each class
    bool is_last;
  };

  Shared& shared;
  const MaskTilesParams& params;
  const VariantArgs& args;
  const WorkItem* items = plan_items(params.plan);
  i32 num_items = params.plan->num_items;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  FP_DEVICE static void run(const MaskTilesParams& params, const VariantArgs& args) {
    __shared__ Shared shared;
    ptx::grid_dependency_wait();
    ptx::grid_dependency_launch();
    const MaskTiles kernel(shared, params, args);
    kernel.classify_all();
    if (kernel.is_last()) kernel.queue_units();
  }

 private:
  FP_DEVICE MaskTiles(Shared& shared, const MaskTilesParams& params, const VariantArgs& args)
      : shared(shared), params(params), args(args) {}

  // Classifies each request once, at the first piece of its first unit. Items of a lane are in the plan once for all
  // its heads.
  FP_DEVICE void classify_all() const {
    for (i32 begin = 0; begin < num_items; begin += threads) {
      if (threadIdx.x == 0) shared.num_found = 0;
      __syncthreads();
      const i32 i = begin + threadIdx.x;
      if (i < num_items && items[i].first_packed_row == 0 && items[i].kv_head == 0 && items[i].piece == 0)
        shared.found[atomicAdd(&shared.num_found, 1)] = i;
      __syncthreads();
      for (i32 k = 0; k < shared.num_found; ++k) classify(items[shared.found[k]]);
      __syncthreads();
    }
  }

  // All warps classify one cell at a time. Requests begin at different CTAs. If causal hides tokens, later cells of a
  // request take longer, so CTAs go through every other round in reverse.
  FP_DEVICE void classify(const WorkItem& item) const {
    const RequestTiles tiles(params, item);
    const Classifier classifier(params, args, item);
    const i32 num_ctas = gridDim.x, first = (blockIdx.x + item.request * 37u) % num_ctas, all = tiles.cells();
    for (i32 round = 0; round * num_ctas < all; ++round) {
      const i32 at = round * num_ctas + (round % 2 == 0 ? first : num_ctas - 1 - first);
      if (at >= all) continue;
      const i32 row_tile = at / tiles.words, word = at % tiles.words;
      const TileWord mine =
          classifier.template classify<warps>(row_tile / tiles.row_tiles, row_tile % tiles.row_tiles, word, warp);
      const TileWord found = combine(mine);
      if (threadIdx.x == 0) *tile_words(params, static_cast<u32>(tiles.first_cell + at)) = found;
      if constexpr (Traits::mask_source == MaskSource::packed_bits)
        classifier.template write_mixed<warps>(found, row_tile % tiles.row_tiles, word, warp);
    }
  }
  FP_DEVICE TileWord combine(const TileWord& of_warp) const {
    if (lane == 0) shared.found_by[warp] = of_warp;
    __syncthreads();
    TileWord all{};
    for (int i = 0; i < warps; ++i) {
      all.visible |= shared.found_by[i].visible;
      all.hidden |= shared.found_by[i].hidden;
    }
    __syncthreads();
    return all;
  }

  FP_DEVICE UnitQueue& queue() const { return *reinterpret_cast<UnitQueue*>(params.cells); }
  FP_DEVICE bool is_last() const {
    __syncthreads();
    if (threadIdx.x == 0) shared.is_last = ptx::add_acquire_release(&queue().arrived, 1) == gridDim.x - 1;
    __syncthreads();
    return shared.is_last;
  }

  // Sorts by counting: units of one class stay roughly in the plan's order, whose waves all CTAs go through at the same
  // time. A CTA's items are consecutive, so the threads are divided among the CTAs.
  FP_DEVICE void queue_units() const {
    const i32 num_ctas = params.plan->num_ctas, lanes = max_of(1, threads / max_of(1, num_ctas));
    QueuedUnit* list = queued_units(params, params.list_begin);
    QueuedUnit* sorted = queued_units(params, params.queue_begin);
    for (int i = threadIdx.x; i < count_classes; i += threads) shared.places[i] = 0;
    if (threadIdx.x == 0) shared.num_found = 0;
    __syncthreads();
    for (i32 cta = threadIdx.x / lanes; cta < num_ctas; cta += threads / lanes) {
      const CtaItems mine = cta_items(params.plan, cta);
      for (i32 i = mine.begin; i < mine.end; ++i) {
        const WorkItem item = item_of_cta(items[i], mine);
        for (i32 unit = threadIdx.x % lanes; unit < item.num_units; unit += lanes) {
          const QueuedUnit found = queued_unit(params, item, i, unit);
          list[atomicAdd(&shared.num_found, 1)] = found;
          atomicAdd(&shared.places[found.count_class], 1);
        }
      }
    }
    __syncthreads();
    if (warp == 0) counts_to_places();
    if (threadIdx.x == 0) queue() = {static_cast<u32>(shared.num_found), 0, 0, 0};
    __syncthreads();
#pragma unroll 4
    for (i32 i = threadIdx.x; i < shared.num_found; i += threads) {
      const QueuedUnit unit = list[i];
      sorted[atomicAdd(&shared.places[unit.count_class], 1)] = unit;
    }
  }
  // Called by one warp. Turns counts into positions, the highest class first.
  FP_DEVICE void counts_to_places() const {
    constexpr int mine = count_classes / 32;
    u32* last = shared.places + count_classes - 1 - lane * mine;
    u32 sum = 0;
    for (int i = 0; i < mine; ++i) sum += last[-i];
    u32 up_to_mine = sum;
    for (int step = 1; step < 32; step *= 2) {
      const u32 before = __shfl_up_sync(0xffffffff, up_to_mine, step);
      if (lane >= step) up_to_mine += before;
    }
    u32 place = up_to_mine - sum;
    for (int i = 0; i < mine; ++i) {
      const u32 count = last[-i];
      last[-i] = place;
      place += count;
    }
  }
};

}  // namespace flashpage
