// Before the attention under a custom mask or a variant's mask function: which tiles hold anything, and which units
// have most of them. No bit of it comes back to the host.
#pragma once
#include "flashpage/ptx/atomic.h"
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

  // Things of which a thread has some each, numbered: how many there are up to a thread's last.
  struct Numbers {
    i32 ends[threads];
    i32 of_warp[warps];
  };
  struct Shared {
    Numbers outer, inner;                   // cells by requests; then items by CTAs, and units by items
    i32 item_of[threads], cta_of[threads];  // a thread's item, and who has it
    typename Looks::Shared looks[warps];
    TileWord found_by[warps];
    u32 places[count_classes];  // in the queue: of the next unit of a class
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

  // By all threads. Returns how many things there are.
  FP_DEVICE i32 number(Numbers& numbers, i32 mine) const {
    i32 end = mine;
    for (int step = 1; step < 32; step *= 2) {
      const i32 before = __shfl_up_sync(0xffffffff, end, step);
      if (lane >= step) end += before;
    }
    if (lane == 31) numbers.of_warp[warp] = end;
    __syncthreads();
    i32 all = 0;
    for (int i = 0; i < warps; ++i) {
      if (i == warp) end += all;
      all += numbers.of_warp[i];
    }
    numbers.ends[threadIdx.x] = end;
    __syncthreads();
    return all;
  }
  struct Numbered {
    i32 thread;
    i32 place;  // among the thread's
  };
  FP_DEVICE static Numbered find(const Numbers& numbers, i32 at) {
    i32 thread = 0;
#pragma unroll
    for (int step = threads / 2; step > 0; step /= 2)
      if (numbers.ends[thread + step - 1] <= at) thread += step;
    return {thread, at - (thread > 0 ? numbers.ends[thread - 1] : 0)};
  }

  // Each request once: at the first piece of its first unit. Items of a team stand in the plan once, for all its heads.
  // A cell at a time by all warps. Later cells of a request have more to look at where causal hides tokens, so that
  // every other turn goes the other way.
  FP_DEVICE void classify_all() const {
    const i32 num_ctas = gridDim.x, cta = blockIdx.x;
    for (i32 begin = 0; begin < num_items; begin += threads) {
      const i32 i = begin + threadIdx.x;
      i32 cells = 0;
      if (i < num_items) {
        const WorkItem item = items[i];
        if ((item.first_packed_row | item.kv_head | item.piece) == 0) cells = RequestTiles(params, item).cells();
      }
      const i32 all = number(shared.outer, cells);
      for (i32 turn = 0; turn * num_ctas < all; ++turn) {
        const i32 at = turn * num_ctas + (turn % 2 == 0 ? cta : num_ctas - 1 - cta);
        if (at >= all) continue;
        const Numbered cell = find(shared.outer, at);
        classify(items[begin + cell.thread], cell.place);
      }
      __syncthreads();
    }
  }
  FP_DEVICE void classify(const WorkItem& item, i32 at) const {
    const RequestTiles tiles(params, item);
    const Looks looks(shared.looks[warp], params, args, item);
    const i32 block = at / tiles.words, word = at % tiles.words;
    const TileWord mine = looks.template look<warps>(block / tiles.row_blocks, block % tiles.row_blocks, word, warp);
    const TileWord found = combine(mine);
    if (threadIdx.x == 0) *tile_words(params, static_cast<u32>(tiles.first_cell + at)) = found;
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

  // Sorts by counting: units of one class come about as they do in the plan, whose waves all CTAs walk at a time.
  FP_DEVICE void queue_units() const {
    QueuedUnit* list = queued_units(params, params.list_begin);
    QueuedUnit* sorted = queued_units(params, params.queue_begin);
    for (int i = threadIdx.x; i < count_classes; i += threads) shared.places[i] = 0;
    __syncthreads();
    const i32 num_units = list_units(list);
    __syncthreads();
    if (warp == 0) counts_to_places();
    if (threadIdx.x == 0) queue() = {static_cast<u32>(num_units), 0, 0, 0};
    __syncthreads();
#pragma unroll 4
    for (i32 i = threadIdx.x; i < num_units; i += threads) {
      const QueuedUnit unit = list[i];
      sorted[atomicAdd(&shared.places[unit.count_class], 1)] = unit;
    }
  }
  // In the plan's order, and counts those of each class.
  FP_DEVICE i32 list_units(QueuedUnit* list) const {
    const i32 num_ctas = params.plan->num_ctas;
    i32 listed = 0;
    for (i32 first_cta = 0; first_cta < num_ctas; first_cta += threads) {
      const i32 cta = first_cta + threadIdx.x;
      const CtaItems of_cta = cta < num_ctas ? cta_items(params.plan, cta) : CtaItems{};
      const i32 num_items = number(shared.outer, of_cta.end - of_cta.begin);
      for (i32 first_item = 0; first_item < num_items; first_item += threads) {
        i32 mine = 0;
        if (const i32 at = first_item + threadIdx.x; at < num_items) {
          const Numbered item = find(shared.outer, at);
          const i32 its_cta = first_cta + item.thread;
          const i32 index = cta_items(params.plan, its_cta).begin + item.place;
          shared.item_of[threadIdx.x] = index;
          shared.cta_of[threadIdx.x] = its_cta;
          mine = items[index].num_units;
        }
        const i32 units = number(shared.inner, mine);
        for (i32 at = threadIdx.x; at < units; at += threads) {
          const Numbered unit = find(shared.inner, at);
          const i32 index = shared.item_of[unit.thread];
          const WorkItem item = item_of_member(items[index], cta_items(params.plan, shared.cta_of[unit.thread]));
          const QueuedUnit found = queued_unit(params, item, index, unit.place);
          list[listed + at] = found;
          atomicAdd(&shared.places[found.count_class], 1);
        }
        listed += units;
        __syncthreads();
      }
    }
    return listed;
  }
  // As one warp, the highest class first.
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
