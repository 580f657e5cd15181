// How kernels/helpers/mask_tiles.h reads a packed custom mask: each lane looks at one tile, and the warps share the
// rows of a row tile. It also writes the bits of mixed tiles.
#pragma once
#include "flashpage/tile/mask/lane_bits.h"
#include "flashpage/tile/mask/mask_tiles.h"

namespace flashpage {

struct BitTiles {
  const MaskTilesParams& params;
  WorkItem item;
  PackedMask mask;

  FP_DEVICE BitTiles(const MaskTilesParams& params, const VariantArgs&, const WorkItem& item)
      : params(params), item(item), mask(params.custom_mask, item) {}

  // The tiles of one cell, by the rows that warp `warp` looks at. All heads see the same.
  template <int warps>
  FP_DEVICE TileWord classify(i32, i32 row_tile, i32 word, int warp) const {
    const auto [begin, end] = rows_of(row_tile);
    const i32 token = (word * cell_tiles + static_cast<i32>(threadIdx.x % 32)) * params.tile_kv;
    u32 visible = 0, hidden = 0;
#pragma unroll 2
    for (i32 row = begin + warp; row < end; row += warps)
      mask.classify(row, token, min_of(params.tile_kv, item.kv_len - token), visible, hidden);
    return {__ballot_sync(0xffffffff, visible != 0), __ballot_sync(0xffffffff, hidden != 0)};
  }

  // Writes the bits of a cell's mixed tiles as computing lanes read them. Each warp takes every `warps`-th tile.
  template <int warps>
  FP_DEVICE void write_mixed(const TileWord& found, i32 row_tile, i32 word, int warp) const {
    const auto [begin, end] = rows_of(row_tile);
    u8* of_all = reinterpret_cast<u8*>(params.cells + params.lanes_begin);
    const LaneBits lanes(LaneBits::begin_of(of_all, item, params.tile_kv), item.kv_len, params.tile_kv);
    const int lane = threadIdx.x % 32;
    u32 mixed = found.visible & found.hidden;
    for (int skipped = 0; mixed != 0; mixed &= mixed - 1, skipped = (skipped + 1) % warps) {
      if (skipped != warp) continue;
      const i32 tile = word * cell_tiles + __ffs(mixed) - 1;
#pragma unroll 2
      for (i32 row = begin + lane / 4; row < end; row += 8) {
        const u64 bits = lane_word(mask, row, tile * params.tile_kv, params.tile_kv, lane);
        u8* to = lanes.quad(row, tile);
        if (lane_word_bytes(params.tile_kv) == 8) {
          reinterpret_cast<u64*>(to)[lane % 4] = bits;
        } else {
          reinterpret_cast<u32*>(to)[lane % 4] = static_cast<u32>(bits);
        }
      }
    }
  }

 private:
  struct Rows {
    i32 begin, end;  // of the request
  };
  FP_DEVICE Rows rows_of(i32 row_tile) const {
    const i32 rows = item.q_len * static_cast<i32>(params.group.divisor);
    return {static_cast<i32>(params.group.div(row_tile * params.tile_q)),
            static_cast<i32>(params.group.div(min_of(rows, (row_tile + 1) * params.tile_q) - 1)) + 1};
  }
};

}  // namespace flashpage
