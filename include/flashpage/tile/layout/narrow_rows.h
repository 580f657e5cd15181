// Rows of at most 64 bytes in lines of 64, as the copy engine writes boxes with its 64-byte swizzle: such a tile has no
// gaps, where SwizzledRows would leave half of each line unused.
#pragma once
#include "flashpage/tile/layout/swizzled_rows.h"

namespace flashpage {

// Has the interface of SwizzledRows; a tile starts on 512 bytes.
template <class Element, int columns, int rows>
struct NarrowRows {
  static constexpr int used_bytes = columns * static_cast<int>(sizeof(Element));
  static constexpr int padded_columns = round_up(columns, 16);
  static constexpr int padded_bytes = padded_columns * static_cast<int>(sizeof(Element));
  static constexpr int chunks = ceil_div(padded_bytes, 16);
  static constexpr int panels = 1;
  static constexpr int panel_columns = 64 / static_cast<int>(sizeof(Element));
  static constexpr int stride = 64;  // bytes from row to row
  static constexpr int panel_bytes = rows * stride;
  static constexpr int tile_bytes = panel_bytes;
  static_assert(padded_bytes <= stride);

  // Two rows share 128 bytes, and the swizzle has the same period as they.
  FP_DEVICE static u32 chunk_offset(u32 row, u32 chunk) { return row * stride + ((chunk ^ row / 2) & 3) * 16; }
  FP_DEVICE static u32 lane_address(u32 tile, u32 row, u32 lane_chunk) { return tile + chunk_offset(row, lane_chunk); }
  FP_DEVICE static u32 at_chunk(u32 lane_address, u32 chunk) { return lane_address ^ (chunk & 3) * 16; }
  FP_DEVICE static u32 byte_offset(u32 row, u32 byte) { return chunk_offset(row, byte / 16) + byte % 16; }
};

template <RowsLayout layout, class Element, int columns, int rows>
struct SelectLines {
  using type = SwizzledRows<Element, columns, rows>;
};
template <class Element, int columns, int rows>
struct SelectLines<RowsLayout::narrow, Element, columns, rows> {
  using type = NarrowRows<Element, columns, rows>;
};
template <RowsLayout layout, class Element, int columns, int rows>
using LineRows = typename SelectLines<layout, Element, columns, rows>::type;

}  // namespace flashpage
