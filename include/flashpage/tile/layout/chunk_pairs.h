// Addresses for ldmatrix of two chunks that lie `apart` chunks apart: some lanes give the first, some the second.
#pragma once
#include "flashpage/common/types.h"

namespace flashpage {

// `Rows`: SharedRows or BlockRows.
template <class Rows, int apart>
struct ChunkPairs {
  // The first chunk and the distance then have no bit in common, and a chunk costs one XOR.
  static constexpr bool is_power_of_two = (apart & (apart - 1)) == 0;

  // The lane's part of its addresses, once a tile.
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
