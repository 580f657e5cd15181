// ldmatrix addresses of two chunks that are `apart` chunks apart: some lanes address the first, some the second.
#pragma once
#include "flashpage/common/types.h"

namespace flashpage {

// `Rows`: SharedRows or SwizzledRows.
template <class Rows, int apart>
struct ChunkPairs {
  // Then the first chunk and the distance have no bit in common, and the address of a chunk costs one XOR.
  static constexpr bool is_power_of_two = (apart & (apart - 1)) == 0;

  // The part of the addresses that depends on the lane; computed once a tile.
  FP_DEVICE static u32 lane_address(u32 tile, u32 row, u32 second) {
    return is_power_of_two ? Rows::lane_address(tile, row, second * apart) : tile;
  }
  // `chunk` < apart.
  FP_DEVICE static u32 at(u32 lane_address, u32 row, u32 second, u32 chunk) {
    return is_power_of_two ? Rows::at_chunk(lane_address, chunk)
                           : lane_address + Rows::chunk_offset(row, chunk + second * apart);
  }
};

}  // namespace flashpage
