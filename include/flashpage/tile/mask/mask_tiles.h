// Which tiles of a custom mask or a mask function are visible, and the order in which a launch takes its units: the
// memory that kernels/helpers/mask_tiles.h writes, before the runs of a plan or before each run, and that the attention
// kernel reads.
//
// It consists of cells of 8 bytes: a UnitQueue, the tiles, from MaskTilesParams::queue_begin on the units, those with
// the most visible tiles first, then space for the unsorted units and the bits of mixed tiles. The host planner does
// not know the mask, so CTAs claim units at run time; the result does not depend on which CTA claims which unit.
#pragma once
#include "flashpage/params/params.h"
#include "flashpage/plan/mask_cells.h"

namespace flashpage {

struct UnitQueue {
  u32 num_units;
  u32 claimed;  // number of claims so far; 0 between launches
  u32 arrived;  // CTAs of the kernel that writes all this
  u32 unused;
};
struct alignas(16) QueuedUnit {
  i32 item;  // index in the plan
  i32 row_tile;
  i32 kv_head;
  i32 partial_row;  // replaces the item's
  u32 cell;         // cell of the first of the row tile's tiles
  i32 count_class;  // class of the number of its visible tiles
  i32 unused[2];
};
static_assert(sizeof(QueuedUnit) == unit_cells * sizeof(u64) && sizeof(UnitQueue) == first_tile_cell * sizeof(u64));

// Tiles 32 * word .. 32 * word + 31 of a row tile (the rows of a unit), a bit for each. Under a mask function, pairs
// of a row and a token that causal or window hide count neither as visible nor as hidden.
struct TileWord {
  u32 visible;  // some row sees a token of the tile
  u32 hidden;   // some row does not see a token of the tile
};
static_assert(sizeof(TileWord) == sizeof(u64));

// The tiles of one request. If KV heads have tiles of their own, those of the heads follow each other.
struct RequestTiles {
  i64 first_cell;
  i32 heads;
  i32 row_tiles;  // of a head
  i32 words;      // of a row tile

  FP_HOST_DEVICE RequestTiles(const MaskTilesParams& params, const WorkItem& item) {
    const i32 group = static_cast<i32>(params.group.divisor);
    const i64 before = params.custom_mask == nullptr
                           ? item.mask_offset
                           : mask_tile_cells(item.mask_offset, item.q_begin, item.request, group);
    heads = params.tile_heads;
    first_cell = first_tile_cell + heads * before;
    row_tiles = ceil_div(item.q_len * group, params.tile_q);
    words = ceil_div(item.kv_len, cell_tiles * params.tile_kv);
  }
  FP_HOST_DEVICE i32 cells() const { return heads * row_tiles * words; }
  FP_HOST_DEVICE u32 cell(i32 row_tile, i32 kv_head) const {
    const i64 tiles_before = static_cast<i64>(min_of(kv_head, heads - 1)) * row_tiles + row_tile;
    return static_cast<u32>(first_cell + tiles_before * words);
  }
};

// The data that a cell begins.
FP_HOST_DEVICE TileWord* tile_words(const MaskTilesParams& params, u32 cell) {
  return reinterpret_cast<TileWord*>(params.cells + cell);
}
FP_HOST_DEVICE QueuedUnit* queued_units(const MaskTilesParams& params, i64 cell) {
  return reinterpret_cast<QueuedUnit*>(params.cells + cell);
}

// The number of visible tiles among [begin, end) of a row tile.
FP_HOST_DEVICE i32 count_visible(const TileWord* words, i32 begin, i32 end) {
  i32 count = 0;
  for (i32 word = begin >> 5; word << 5 < end; ++word) {
    u32 bits = words[word].visible;
    if (word << 5 < begin) bits &= ~0u << (begin & 31);
    if (end - (word << 5) < 32) bits &= ~(~0u << (end & 31));
    count += count_ones(bits);
  }
  return count;
}

// Classes of counts in steps of an eighth; the queue need not be sorted more finely.
inline constexpr int count_classes = 256;
FP_HOST_DEVICE i32 count_class(u32 count) {
  i32 exponent = 0;
  while (count >> exponent >= 16) ++exponent;
  return exponent * 8 + static_cast<i32>(count >> exponent);  // below 2^31: 27 * 8 + 15
}

// Unit `unit` of the item with index `index`; `item` is adjusted to its CTA.
FP_HOST_DEVICE QueuedUnit queued_unit(const MaskTilesParams& params, const WorkItem& item, i32 index, i32 unit) {
  const RequestTiles tiles(params, item);
  const i32 at = item.first_packed_row / params.tile_q + unit, row_tile = at % tiles.row_tiles;
  const i32 kv_head = item.kv_head + at / tiles.row_tiles;
  const u32 cell = tiles.cell(row_tile, kv_head);
  const i32 count =
      count_visible(tile_words(params, cell), item.kv_begin / params.tile_kv, ceil_div(item.kv_end, params.tile_kv));
  return {index, row_tile, kv_head, item.partial_row, cell, count_class(count), {}};
}

}  // namespace flashpage
