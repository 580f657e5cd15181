// Rows in panels of 128 bytes, as the copy engine writes boxes with its 128-byte swizzle: panel by panel, each with all
// rows.
#pragma once
#include "flashpage/common/math.h"

namespace flashpage {

// Has the interface of SharedRows; a tile starts on 1024 bytes.
template <class Element, int columns, int rows>
struct SwizzledRows {
  static constexpr int used_bytes = columns * static_cast<int>(sizeof(Element));
  static constexpr int padded_columns = round_up(columns, 16);
  static constexpr int padded_bytes = padded_columns * static_cast<int>(sizeof(Element));
  static constexpr int chunks = ceil_div(padded_bytes, 16);
  static constexpr int panels = ceil_div(padded_bytes, 128);
  static constexpr int panel_columns = 128 / static_cast<int>(sizeof(Element));
  static constexpr int stride = 128;  // bytes from row to row
  static constexpr int panel_bytes = rows * stride;
  static constexpr int tile_bytes = panels * panel_bytes;

  FP_DEVICE static u32 chunk_offset(u32 row, u32 chunk) {
    return (chunk / 8) * panel_bytes + row * stride + ((chunk ^ row) & 7) * 16;
  }
  FP_DEVICE static u32 lane_address(u32 tile, u32 row, u32 lane_chunk) { return tile + chunk_offset(row, lane_chunk); }
  FP_DEVICE static u32 at_chunk(u32 lane_address, u32 chunk) {
    return (lane_address ^ (chunk & 7) * 16) + (chunk / 8) * panel_bytes;
  }
  FP_DEVICE static u32 byte_offset(u32 row, u32 byte) { return chunk_offset(row, byte / 16) + byte % 16; }
};

}  // namespace flashpage
