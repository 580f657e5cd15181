// A tile of rows in shared memory that ldmatrix reads without bank conflicts.
#pragma once
#include "flashpage/common/math.h"

namespace flashpage {

// Rows of `columns` elements in chunks of 16 bytes. Rows of a multiple of 128 bytes are XOR-swizzled (eight
// neighbouring rows use eight different bank groups); other rows get an odd number of chunks, which has the same
// effect.
template <class Element, int columns>
struct SharedRows {
  static constexpr int used_bytes = columns * static_cast<int>(sizeof(Element));
  // fp8 and 16-bit rows are padded to whole k16 steps of the tensor core.
  static constexpr int padded_columns = round_up(columns, 16);
  static constexpr int padded_bytes = padded_columns * static_cast<int>(sizeof(Element));
  static constexpr int chunks = ceil_div(padded_bytes, 16);
  static constexpr bool swizzled = padded_bytes % 128 == 0;
  static constexpr int stride = swizzled ? padded_bytes : (chunks | 1) * 16;  // bytes

  static constexpr int bytes(int rows) { return rows * stride; }

  // Byte offset of a 16-byte chunk.
  FP_DEVICE static u32 chunk_offset(u32 row, u32 chunk) {
    if constexpr (swizzled) chunk ^= row & 7;
    return row * stride + chunk * 16;
  }

  // The offset in two steps: lane_address depends on the lane and is computed once a tile; at_chunk takes a constant
  // chunk and costs one XOR. `lane_chunk` and `chunk` have no bit in common.
  FP_DEVICE static u32 lane_address(u32 tile, u32 row, u32 lane_chunk) { return tile + chunk_offset(row, lane_chunk); }
  FP_DEVICE static u32 at_chunk(u32 lane_address, u32 chunk) {
    if constexpr (swizzled) return (lane_address ^ (chunk & 7) * 16) + (chunk & ~7u) * 16;
    return lane_address + chunk * 16;
  }
  FP_DEVICE static u32 byte_offset(u32 row, u32 byte) { return chunk_offset(row, byte / 16) + byte % 16; }
};

// Neighbouring columns of wider rows, counted from a multiple of 128 bytes.
template <class Wide, class Element, int columns>
struct LeadingColumns : Wide {
  static constexpr int chunks = ceil_div(round_up(columns, 16) * static_cast<int>(sizeof(Element)), 16);
};

}  // namespace flashpage
