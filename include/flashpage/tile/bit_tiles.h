// What kernels/mask_tiles.h finds in a packed custom mask: a warp reads a row's words side by side, as wide as a cell,
// and a block's rows are all warps' in turn.
#pragma once
#include "flashpage/tile/mask_tiles.h"
#include "flashpage/tile/packed_mask.h"

namespace flashpage {

struct BitTiles {
  static constexpr int rows_at_once = 2;               // of a warp
  static constexpr int parts = most_tile_tokens / 32;  // words of a lane: a cell has as many as a tile has tokens

  // Of a warp: what some of its rows see, and what all of them do, words that begin with the cell's first token.
  struct Shared {
    u32 some[most_tile_tokens], all[most_tile_tokens];
  };

  Shared& shared;
  const MaskTilesParams& params;
  WorkItem item;
  PackedMask mask;
  int lane = threadIdx.x % 32;

  FP_DEVICE BitTiles(Shared& shared, const MaskTilesParams& params, const VariantArgs&, const WorkItem& item)
      : shared(shared), params(params), item(item), mask(params.custom_mask, item) {}

  // What the rows of warp `warp` say of the tiles of one cell. All heads see the same.
  template <int warps>
  FP_DEVICE TileWord look(i32, i32 row_block, i32 word, int warp) const {
    const i32 rows = item.q_len * static_cast<i32>(params.group.divisor);
    const i32 begin = params.group.div(row_block * params.tile_q);
    const i32 end = params.group.div(min_of(rows, (row_block + 1) * params.tile_q) - 1) + 1;
    const i32 first = word * cell_tiles * params.tile_kv,
              tokens = min_of(cell_tiles * params.tile_kv, item.kv_len - first);
    u32 some[parts] = {}, all[parts];
#pragma unroll
    for (int part = 0; part < parts; ++part) all[part] = ~0u;
    for (i32 row = begin + warp; row < end; row += warps * rows_at_once) {
      u32 found[rows_at_once][parts + 1];  // all are asked for before the first is looked at
#pragma unroll
      for (int i = 0; i < rows_at_once; ++i) read(row_of(row, i * warps, end), first, tokens, found[i]);
#pragma unroll
      for (int i = 0; i < rows_at_once; ++i) add(row_of(row, i * warps, end), first, found[i], some, all);
    }
#pragma unroll
    for (int part = 0; part < parts; ++part) {
      shared.some[part * 32 + lane] = some[part];
      shared.all[part * 32 + lane] = all[part];
    }
    __syncwarp();
    const TileWord mine = tile(lane * params.tile_kv, min_of((lane + 1) * params.tile_kv, tokens));
    __syncwarp();
    return {__ballot_sync(0xffffffff, mine.visible != 0), __ballot_sync(0xffffffff, mine.hidden != 0)};
  }

 private:
  // Or the row itself again, which makes no difference.
  FP_DEVICE static i32 row_of(i32 row, i32 further, i32 end) { return row + further < end ? row + further : row; }

  // Words as they lie in memory, every 32nd one a lane's: rows begin at any bit.
  FP_DEVICE void read(i32 row, i32 first, i32 tokens, u32 (&found)[parts + 1]) const {
    const i64 begin = mask.word_of(row, first) + lane, whole = mask.whole - begin;
    const u32* words = mask.words + begin;
    const i32 count = static_cast<i32>(min_of<i64>(whole, ceil_div(tokens, 32) + 1 - lane));  // from this one on
#pragma unroll
    for (int part = 0; part <= parts; ++part) found[part] = part * 32 < count ? words[part * 32] : 0;
    if (mask.rest == 0) return;
#pragma unroll
    for (int part = 0; part <= parts; ++part)
      if (part * 32 == whole) found[part] = mask.rest;
  }
  FP_DEVICE void add(i32 row, i32 first, const u32 (&found)[parts + 1], u32 (&some)[parts], u32 (&all)[parts]) const {
    const u32 place = PackedMask::place_in_word(params.custom_mask, item, row, first);
#pragma unroll
    for (int part = 0; part < parts; ++part) {
      const u32 wanted = lane > 0 ? found[part] : found[part + 1];  // by the lane before
      const u32 bits = PackedMask::join(found[part], __shfl_sync(0xffffffff, wanted, (lane + 1) % 32), place);
      some[part] |= bits;
      all[part] &= bits;
    }
  }
  // Of tokens [begin, end) of the cell.
  FP_DEVICE TileWord tile(i32 begin, i32 end) const {
    TileWord found{};
    for (i32 word = begin >> 5; word << 5 < end; ++word) {
      u32 exist = ~0u;
      if (word << 5 < begin) exist &= ~0u << (begin & 31);
      if (end - (word << 5) < 32) exist &= ~(~0u << (end & 31));
      found.visible |= shared.some[word] & exist;
      found.hidden |= ~shared.all[word] & exist;
    }
    return found;
  }
};

}  // namespace flashpage
