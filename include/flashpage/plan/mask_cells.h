// How much memory a batch's mask tiles take: the numbers that the host plans with and that tile/mask/ lays out.
//
// Cells of 8 bytes. A cell of tiles has two bits for each of 32 tiles of tokens of one row tile (tile/mask/mask_tiles.h
// says what they mean); behind those lie the queue of units and the bits of mixed tiles (tile/mask/lane_bits.h).
#pragma once
#include "flashpage/common/math.h"

namespace flashpage {

inline constexpr i32 cell_tiles = 32;
inline constexpr i64 first_tile_cell = 2;  // behind a UnitQueue
inline constexpr i64 unit_cells = 4;       // of a QueuedUnit

// Under packed bits: cells before those of a request, from the sizes of all requests before it; of all requests: the
// cells of a batch. A request of q rows and t tokens has ceil(q * group / tile_q) * ceil(t / (32 * tile_kv)) of them,
// which is at most bytes * group / 8192 + bytes / 128 + q * group / 64 + 1 where its mask has `bytes` bytes, tile_q is
// 64 or more and tile_kv 32 or more. One more a request is for rounding.
FP_HOST_DEVICE i64 mask_tile_cells(i64 mask_bytes, i64 rows, i64 requests, i64 group) {
  return (mask_bytes * (group + 64) + rows * group * 128) / 8192 + 2 * requests;
}

// Of one row, tile and lane of a quad.
FP_HOST_DEVICE constexpr i32 lane_word_bytes(i32 tile_kv) { return tile_kv > 128 ? 8 : 4; }

// Tiles of rows that lie before a request, from the sizes of all requests before it; of all requests: those of a batch.
// A request of q rows and t tokens has q * ceil(t / tile_kv) of them, and its bits take q * t / 8 bytes or more.
FP_HOST_DEVICE constexpr i64 row_tiles_before(i64 mask_bytes, i64 rows, i32 tile_kv) {
  return mask_bytes * 8 / tile_kv + rows;
}

}  // namespace flashpage
