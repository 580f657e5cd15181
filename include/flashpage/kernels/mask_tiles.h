// Before the attention under a custom mask or a variant's mask function: which tiles hold anything, and in which order
// the units are taken. No bit of it comes back to the host.
#pragma once
#include "flashpage/kernels/mask_queue.h"
#include "flashpage/ptx/griddepcontrol.h"
#include "flashpage/tile/asked_tiles.h"
#include "flashpage/tile/bit_tiles.h"
#include "flashpage/tile/mask_tiles.h"

namespace flashpage {

template <class Traits>
struct MaskTiles {
  using Looks = typename select_type<Traits::mask_source == MaskSource::function, AskedTiles<Traits>, BitTiles>::type;
  static constexpr int warps = 16;
  static constexpr int threads = 32 * warps;

  using Queue = MaskQueue<warps>;

  struct Shared {
    i32 found[threads];  // items that begin a request
    i32 num_found;
    TileWord found_by[warps];
    typename Queue::Shared queue;
  };

  Shared& shared;
  const MaskTilesParams& params;
  const VariantArgs& args;
  const Queue& queue;
  const WorkItem* items = plan_items(params.plan);
  i32 num_items = params.plan->num_items;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  FP_DEVICE static void run(const MaskTilesParams& params, const VariantArgs& args) {
    __shared__ Shared shared;
    ptx::grid_dependency_wait();
    ptx::grid_dependency_launch();
    const Queue queue(shared.queue, params);
    queue.begin();
    MaskTiles(shared, params, args, queue).classify_all();
    queue.finish();
  }

 private:
  FP_DEVICE MaskTiles(Shared& shared, const MaskTilesParams& params, const VariantArgs& args, const Queue& queue)
      : shared(shared), params(params), args(args), queue(queue) {}

  // Each request once: at the first piece of its first unit. Items of a team stand in the plan once, for all its heads.
  FP_DEVICE void classify_all() const {
    for (i32 begin = 0; begin < num_items; begin += threads) {
      if (threadIdx.x == 0) shared.num_found = 0;
      __syncthreads();
      const i32 i = begin + threadIdx.x;
      if (i < num_items && items[i].first_packed_row == 0 && items[i].kv_head == 0 && items[i].piece == 0)
        shared.found[atomicAdd(&shared.num_found, 1)] = i;
      queue.note_items(i < num_items ? items + i : nullptr);
      __syncthreads();
      for (i32 k = 0; k < shared.num_found; ++k) classify(items[shared.found[k]]);
      __syncthreads();
    }
  }

  // A cell at a time by all warps. Requests begin at different CTAs. Later cells of a request have more to look at
  // where causal hides tokens, so that every other turn goes the other way.
  FP_DEVICE void classify(const WorkItem& item) const {
    const RequestTiles tiles(params, item);
    const Looks looks(params, args, item);
    const i32 num_ctas = gridDim.x, first = (blockIdx.x + item.request * 37u) % num_ctas, all = tiles.cells();
    for (i32 turn = 0; turn * num_ctas < all; ++turn) {
      const i32 at = turn * num_ctas + (turn % 2 == 0 ? first : num_ctas - 1 - first);
      if (at >= all) continue;
      const i32 block = at / tiles.words, word = at % tiles.words;
      const TileWord mine = looks.template look<warps>(block / tiles.row_blocks, block % tiles.row_blocks, word, warp);
      const TileWord found = combine(mine);
      if (threadIdx.x != 0) continue;
      *tile_words(params, static_cast<u32>(tiles.first_cell + at)) = found;
      queue.note_cell(found);
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
};

}  // namespace flashpage
