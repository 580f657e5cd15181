// What kernels/mask_tiles.h finds in a packed custom mask: a tile a lane, and a block's rows by all warps in turn.
#pragma once
#include "flashpage/tile/mask_tiles.h"
#include "flashpage/tile/packed_mask.h"

namespace flashpage {

struct BitTiles {
  const MaskTilesParams& params;
  WorkItem item;
  PackedMask mask;

  FP_DEVICE BitTiles(const MaskTilesParams& params, const VariantArgs&, const WorkItem& item)
      : params(params), item(item), mask(params.custom_mask, item) {}

  // What the rows of warp `warp` say of the tiles of one cell. All heads see the same.
  template <int warps>
  FP_DEVICE TileWord look(i32, i32 row_block, i32 word, int warp) const {
    const i32 rows = item.q_len * static_cast<i32>(params.group.divisor);
    const i32 begin = params.group.div(row_block * params.tile_q);
    const i32 end = params.group.div(min_of(rows, (row_block + 1) * params.tile_q) - 1) + 1;
    const i32 token = (word * cell_tiles + static_cast<i32>(threadIdx.x % 32)) * params.tile_kv;
    u32 visible = 0, hidden = 0;
#pragma unroll 2
    for (i32 row = begin + warp; row < end; row += warps)
      mask.look(row, token, min_of(params.tile_kv, item.kv_len - token), visible, hidden);
    return {__ballot_sync(0xffffffff, visible != 0), __ballot_sync(0xffffffff, hidden != 0)};
  }
};

}  // namespace flashpage
