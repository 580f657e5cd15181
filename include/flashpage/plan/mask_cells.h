// The memory that a batch's mask tiles take: sizes that the host plans with and that tile/mask/ lays out.
//
// Memory is counted in cells of 8 bytes. A cell of tiles has two bits for each of 32 tiles of tokens of one row tile
// (tile/mask/mask_tiles.h defines them). The queue of units and the bits of mixed tiles (tile/mask/lane_bits.h) follow
// the tiles.
#pragma once
#include "flashpage/common/math.h"

namespace flashpage {

inline constexpr i32 cell_tiles = 32;
inline constexpr i64 first_tile_cell = 2;  // after a UnitQueue
inline constexpr i64 unit_cells = 4;       // size of a QueuedUnit

// Upper bound for packed bits, from the sums over some requests: with the requests before one, the offset of its cells;
// with all requests, the cells of the batch. A request of q rows and t tokens needs ceil(q * group / tile_q) * ceil(t /
// (32 * tile_kv)) cells, which is at most bytes * group / 8192 + bytes / 128 + q * group / 64 + 1 if its mask has
// `bytes` bytes, tile_q is at least 64 and tile_kv at least 32. The second cell of each request covers rounding.
FP_HOST_DEVICE i64 mask_tile_cells(i64 mask_bytes, i64 rows, i64 requests, i64 group) {
  return (mask_bytes * (group + 64) + rows * group * 128) / 8192 + 2 * requests;
}

// Bytes of mask bits for one row and tile that a lane of a quad holds.
FP_HOST_DEVICE constexpr i32 lane_word_bytes(i32 tile_kv) { return tile_kv > 128 ? 8 : 4; }

// Upper bound of the row tiles, from the sums over some requests: with the requests before one, the offset of its row
// tiles; with all requests, those of the batch. A request of q rows and t tokens has q * ceil(t / tile_kv), and its
// mask has at least q * t / 8 bytes.
FP_HOST_DEVICE constexpr i64 row_tiles_before(i64 mask_bytes, i64 rows, i32 tile_kv) {
  return mask_bytes * 8 / tile_kv + rows;
}

}  // namespace flashpage
