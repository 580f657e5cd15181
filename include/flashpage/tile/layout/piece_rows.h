// Keys in pieces of 16 bytes, as in vLLM's cache of blocks: piece by piece, each with all rows. ldmatrix reads a piece
// of eight neighbouring rows, 128 consecutive bytes, without bank conflicts.
#pragma once
#include "flashpage/common/math.h"

namespace flashpage {

// Has the interface of SharedRows.
template <class Element, int columns, int rows>
struct PieceRows {
  static constexpr int used_bytes = columns * static_cast<int>(sizeof(Element));
  static constexpr int padded_columns = round_up(columns, 16);
  static constexpr int padded_bytes = padded_columns * static_cast<int>(sizeof(Element));
  static constexpr int chunks = ceil_div(padded_bytes, 16);
  static constexpr int stride = 16;  // bytes from row to row
  static constexpr int piece_bytes = rows * stride;
  static constexpr int tile_bytes = chunks * piece_bytes;

  FP_DEVICE static u32 chunk_offset(u32 row, u32 chunk) { return chunk * piece_bytes + row * stride; }
  FP_DEVICE static u32 lane_address(u32 tile, u32 row, u32 lane_chunk) { return tile + chunk_offset(row, lane_chunk); }
  FP_DEVICE static u32 at_chunk(u32 lane_address, u32 chunk) { return lane_address + chunk * piece_bytes; }
  FP_DEVICE static u32 byte_offset(u32 row, u32 byte) { return chunk_offset(row, byte / 16) + byte % 16; }
};

}  // namespace flashpage
