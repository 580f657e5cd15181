// Puts the units of a plan in the order in which CTAs claim them under a mask (tile/mask_tiles.h): wave by wave, and of
// a wave the units with the most visible tiles first.
//
// A wave is a stretch of an axis on which lie requests, and of each its KV heads, as long as their tokens. It has as
// many of them as the L2 keeps, so that units that are computed at a time read the same keys and values; but no wave is
// so short that CTAs would wait for its longest unit.
//
// A CTA whose tiles are written claims a wave, if there may be one left, and lists it when the tiles of all CTAs are
// there. It waits for them only where all have begun, so that nobody waits for a CTA that may need its place on an SM;
// the last one lists what nobody has claimed.
#pragma once
#include "flashpage/ptx/atomic.h"
#include "flashpage/tile/mask_tiles.h"

namespace flashpage {

template <int warps>
struct MaskQueue {
  static constexpr int threads = 32 * warps;

  struct Shared {
    CtaItems lists[threads];    // of items: of the plan's CTAs, so many at a time
    u32 items_before[threads];  // those in the lists before
    u32 num_items;              // in all of these lists
    u32 places[count_classes];  // in the queue, of the next unit of a class: the highest class first
    u32 num_units;              // of the wave
    u32 units_before;           // those of the waves before
    u32 visible;                // tiles of the CTA's cells
    u32 end_entry, longest;     // of all items: where keys and values end (pages or rows); tokens
    u32 wave, num_waves;        // wave: this CTA's
    i64 bounds[2];              // of the wave, on the axis
    bool stays;
  };

  Shared& shared;
  const MaskTilesParams& params;
  const WorkItem* items = plan_items(params.plan);
  i32 num_ctas = params.plan->num_ctas;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  FP_DEVICE MaskQueue(Shared& shared, const MaskTilesParams& params) : shared(shared), params(params) {}

  // The CTA has begun. The others of it know by its next barrier.
  FP_DEVICE void begin() const {
    if (threadIdx.x != 0) return;
    atomicAdd(&state().begun, 1u);
    shared.visible = shared.end_entry = shared.longest = 0;
  }
  // As one warp, whose lanes have an item each or none: each item once.
  FP_DEVICE void note_items(const WorkItem* item) const {
    u32 end_entry = 0, tokens = 0;
    if (item != nullptr) {
      end_entry = static_cast<u32>(item->kv_offset + ceil_div(item->kv_len, params.entry_tokens));
      tokens = static_cast<u32>(item->kv_end - item->kv_begin);
    }
    end_entry = __reduce_max_sync(0xffffffff, end_entry);
    tokens = __reduce_max_sync(0xffffffff, tokens);
    if (lane != 0) return;
    atomicMax(&shared.end_entry, end_entry);
    atomicMax(&shared.longest, tokens);
  }
  // As one thread: a cell that the CTA has written.
  FP_DEVICE void note_cell(const TileWord& found) const { shared.visible += count_ones(found.visible); }

  // All of the CTA's cells are written.
  FP_DEVICE void finish() const {
    __syncthreads();
    if (threadIdx.x == 0) arrive();
    __syncthreads();
    if (shared.stays) list_waves();
    leave();
  }

 private:
  // Of the units of one item those of the wave, numbered on through the item's KV heads.
  struct UnitRun {
    i32 item;
    i32 partial_row;
    i32 first;       // KV head * row_blocks + row block, less the units of the runs that the warp has before this one
    i32 row_blocks;  // of a KV head
    i32 words;       // of a row block
    i32 begin_tile, end_tile;
    u32 first_cell;

    FP_DEVICE UnitRun of_lane(int lane) const {
      constexpr u32 all = 0xffffffff;
      return {__shfl_sync(all, item, lane),     __shfl_sync(all, partial_row, lane),
              __shfl_sync(all, first, lane),    __shfl_sync(all, row_blocks, lane),
              __shfl_sync(all, words, lane),    __shfl_sync(all, begin_tile, lane),
              __shfl_sync(all, end_tile, lane), __shfl_sync(all, first_cell, lane)};
    }
  };

  FP_DEVICE UnitQueue& queue() const { return *reinterpret_cast<UnitQueue*>(params.cells); }
  FP_DEVICE QueueState& state() const { return *reinterpret_cast<QueueState*>(params.cells + queue_state_cell); }

  FP_DEVICE void arrive() const {
    atomicAdd(&state().visible, shared.visible);
    const bool is_last = ptx::add_acquire_release(&queue().arrived, 1) == gridDim.x - 1;
    shared.stays = is_last || ptx::load_acquire(&state().begun) == gridDim.x;
    if (!shared.stays) return;
    shared.wave = atomicAdd(&state().claimed_waves, 1u);
    shared.stays = shared.wave < most_waves();
  }
  // Whoever leaves last makes all ready for the next run.
  FP_DEVICE void leave() const {
    __syncthreads();
    if (threadIdx.x != 0 || ptx::add_acquire_release(&state().left, 1) != gridDim.x - 1) return;
    queue().arrived = 0;
    state() = {};
  }

  FP_DEVICE void list_waves() const {
    read_lists(0);
    if (threadIdx.x == 0) {
      while (ptx::load_acquire(&queue().arrived) != gridDim.x) {
      }
      shared.num_waves = count_waves();
    }
    u32 next = 0;
    while (true) {
      if (threadIdx.x == 0) {
#pragma unroll 1
        for (int i = 0; i < 2; ++i) shared.bounds[i] = begin_of_wave(shared.wave + i);
        next = atomicAdd(&state().claimed_waves, 1u);  // before it is needed, as it takes as long as a load
      }
      __syncthreads();
      if (shared.wave >= shared.num_waves) return;
      list_wave();
      __syncthreads();
      if (threadIdx.x == 0) shared.wave = next;
    }
  }

  // On the axis.
  FP_DEVICE float all_tokens() const {
    return static_cast<float>(static_cast<i64>(shared.end_entry) * params.entry_tokens * params.num_kv_heads);
  }
  FP_DEVICE u32 most_waves() const {
    if (params.wave_tokens == 0) return 1;
    return max_of(1u, static_cast<u32>(all_tokens() / static_cast<float>(params.wave_tokens) + 0.5f));
  }
  // A CTA's share of a wave is at least twice the longest unit, if that sees all its tokens.
  FP_DEVICE u32 count_waves() const {
    const float tiles =
        static_cast<float>(state().visible) * static_cast<float>(params.num_kv_heads / params.tile_heads);
    const i32 longest = max_of(1, ceil_div(static_cast<i32>(shared.longest), params.tile_kv));
    const float by_tiles = tiles / (2.f * static_cast<float>(longest) * static_cast<float>(max_of(1, num_ctas)));
    return min_of(most_waves(), max_of(1u, static_cast<u32>(by_tiles)));
  }
  FP_DEVICE i64 begin_of_wave(u32 wave) const {
    if (wave >= shared.num_waves) return static_cast<i64>(1) << 62;
    return static_cast<i64>(all_tokens() / static_cast<float>(shared.num_waves) * static_cast<float>(wave));
  }

  // Sorts by counting.
  FP_DEVICE void list_wave() const {
    for (int i = threadIdx.x; i < count_classes; i += threads) shared.places[i] = 0;
    if (threadIdx.x == 0) shared.units_before = 0;
    __syncthreads();
    QueuedUnit* sorted = nullptr;
#pragma unroll 1  // the code once
    for (int pass = 0; pass < 2; ++pass) {
      const u32 before = for_each_unit([&](const QueuedUnit& unit) {
        const u32 place = atomicAdd(&shared.places[count_classes - 1 - unit.count_class], 1u);
        if (sorted != nullptr) sorted[place] = unit;
      });
      if (pass > 0) break;
      atomicAdd(&shared.units_before, before);
      __syncthreads();
      if (warp == 0) shared.num_units = to_sums_before<count_classes>(shared.places);
      __syncthreads();
      sorted = queued_units(params, params.queue_begin) + shared.units_before;
    }
    if (threadIdx.x == 0 && shared.wave == shared.num_waves - 1) {
      queue().num_units = shared.units_before + shared.num_units;
      queue().claimed = 0;
    }
  }

  // Lists of `threads` CTAs.
  FP_DEVICE void read_lists(i32 first_cta) const {
    const i32 cta = first_cta + threadIdx.x;
    __syncthreads();
    const CtaItems mine = cta < num_ctas ? cta_items(params.plan, cta) : CtaItems{};
    shared.lists[threadIdx.x] = mine;
    shared.items_before[threadIdx.x] = mine.end - mine.begin;
    __syncthreads();
    if (warp == 0) shared.num_items = to_sums_before<threads>(shared.items_before);
    __syncthreads();
  }

  // Of the wave; that of waves before, as far as this thread has them. A lane has an item, then a unit of any.
  template <class Body>
  FP_DEVICE u32 for_each_unit(Body&& body) const {
    u32 before = 0;
#pragma unroll 1
    for (i32 first_cta = 0; first_cta < num_ctas; first_cta += threads) {
      if (num_ctas > threads) read_lists(first_cta);
#pragma unroll 1
      for (u32 number = threadIdx.x; number - lane < shared.num_items; number += threads) {
        i32 index = 0, count = 0;
        const WorkItem item = listed_item(number, index);
        const UnitRun run = run_of(item, index, before, count);
        for_each_unit_of(run, count, body);
      }
    }
    return before;
  }
  // Item `number` of the lists. Behind the last one come items without units.
  FP_DEVICE WorkItem listed_item(u32 number, i32& index) const {
    if (number >= shared.num_items) return {};
    int list = 0;
#pragma unroll
    for (int step = threads / 2; step > 0; step /= 2)
      if (shared.items_before[list + step] <= number) list += step;
    const CtaItems& mine = shared.lists[list];
    index = mine.begin + static_cast<i32>(number - shared.items_before[list]);
    return item_of_member(items[index], mine);
  }

  FP_DEVICE UnitRun run_of(const WorkItem& item, i32 index, u32& before, i32& count) const {
    if (item.num_units == 0) return {};
    const RequestTiles tiles(params, item);
    const i32 first = item.kv_head * tiles.row_blocks + item.first_packed_row / params.tile_q;
    i32 begin = 0, end = 0;
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      begin = end;
      end = min_of(item.num_units, max_of(0, heads_before(item, shared.bounds[i]) * tiles.row_blocks - first));
    }
    before += begin;
    count = end - begin;
    return {index,
            item.partial_row,
            first + begin,
            tiles.row_blocks,
            tiles.words,
            item.kv_begin / params.tile_kv,
            ceil_div(item.kv_end, params.tile_kv),
            static_cast<u32>(tiles.first_cell)};
  }
  // Of the runs of a warp's lanes, of `count` units each.
  template <class Body>
  FP_DEVICE void for_each_unit_of(UnitRun run, i32 count, Body&& body) const {
    const i32 up_to_mine = sum_up_to(count);
    run.first -= up_to_mine - count;
    const i32 all = __shfl_sync(0xffffffff, up_to_mine, 31);
#pragma unroll 1
    for (i32 unit = lane; unit - lane < all; unit += 32) {
      int owner = 0;
#pragma unroll
      for (int step = 16; step > 0; step /= 2)
        if (__shfl_sync(0xffffffff, up_to_mine, owner + step - 1) <= unit) owner += step;
      const UnitRun mine = run.of_lane(owner);
      if (unit < all) body(queued_unit(mine, mine.first + unit));
    }
  }
  // KV heads of the item's request that begin before a place on the axis. Rounded alike for all waves, so that one ends
  // where the next one begins.
  FP_DEVICE i32 heads_before(const WorkItem& item, i64 place) const {
    const i64 ahead = place - item.kv_offset * params.entry_tokens * params.num_kv_heads;
    if (ahead <= 0) return 0;
    const float heads = static_cast<float>(params.num_kv_heads);
    const float before = static_cast<float>(ahead) / static_cast<float>(item.kv_len);
    const i32 whole = static_cast<i32>(min_of(heads, before));
    return whole < params.num_kv_heads && static_cast<float>(whole) < before ? whole + 1 : whole;
  }
  FP_DEVICE QueuedUnit queued_unit(const UnitRun& run, i32 at) const {
    const i32 kv_head = at / run.row_blocks, row_block = at - kv_head * run.row_blocks;
    const u32 cell = run.first_cell + static_cast<u32>(params.tile_heads == 1 ? row_block : at) * run.words;
    const i32 count = count_visible(tile_words(params, cell), run.begin_tile, run.end_tile);
    return {run.item, row_block, kv_head, run.partial_row, cell, count_class(count), {}};
  }

  // As one warp. Over its lanes, this one included.
  template <class T>
  FP_DEVICE T sum_up_to(T mine) const {
    for (int step = 1; step < 32; step *= 2) {
      const T before = __shfl_up_sync(0xffffffff, mine, step);
      if (lane >= step) mine += before;
    }
    return mine;
  }
  // As one warp: each count becomes the sum of those before it. The sum of all.
  template <int size>
  FP_DEVICE u32 to_sums_before(u32* counts) const {
    constexpr int of_lane = size / 32;
    u32* mine = counts + lane * of_lane;
    u32 sum = 0;
    for (int i = 0; i < of_lane; ++i) sum += mine[i];
    const u32 up_to_mine = sum_up_to(sum);
    u32 before = up_to_mine - sum;
    for (int i = 0; i < of_lane; ++i) {
      const u32 count = mine[i];
      mine[i] = before;
      before += count;
    }
    return __shfl_sync(0xffffffff, up_to_mine, 31);
  }
};

}  // namespace flashpage
