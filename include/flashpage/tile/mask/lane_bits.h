// Copies of a packed custom mask's mixed tiles in the order of computing lanes: kernels/helpers/mask_tiles.h writes
// them, the attention kernel reads them.
//
// Four lanes hold the scores of one row and a tile of tokens, each two of every eight tokens (wgmma's fragments). A
// lane loads the bits of its own tokens at once, next to each other; in the mask itself they lie in several words that
// begin at any bit. Only mixed tiles are written: some row sees a token of theirs, and some row does not see one.
#pragma once
#include "flashpage/plan/mask_cells.h"
#include "flashpage/tile/mask/packed_mask.h"

namespace flashpage {

// The bits of one row, tile and lane.
template <int tile_kv>
using LaneWord = typename select_type<(tile_kv > 128), u64, u32>::type;
inline constexpr i32 most_lane_tokens = 256;  // of a tile

// The memory that holds one request's words.
struct LaneBits {
  u8* begin;
  i32 tiles;  // of a row
  i32 quad_bytes;

  FP_HOST_DEVICE LaneBits(u8* begin, i32 kv_len, i32 tile_kv)
      : begin(begin), tiles(ceil_div(kv_len, tile_kv)), quad_bytes(4 * lane_word_bytes(tile_kv)) {}
  FP_HOST_DEVICE static u8* begin_of(u8* of_all, const WorkItem& item, i32 tile_kv) {
    return of_all + row_tiles_before(item.mask_offset, item.q_begin, tile_kv) * (4 * lane_word_bytes(tile_kv));
  }
  // Where the words of a row's four lanes lie.
  FP_HOST_DEVICE u8* quad(i32 row, i32 tile) const {
    return begin + (static_cast<i64>(row) * tiles + tile) * quad_bytes;
  }
};

// The bits of one lane of a quad, next to each other: two of every eight.
FP_HOST_DEVICE u32 bits_of_lane(u32 word, int lane) {
  u32 found = word >> lane % 4 * 2 & 0x03030303u;
  found = (found | found >> 6) & 0x000f000fu;
  return (found | found >> 12) & 0xffu;
}

// The bits of a lane of a quad for one row and tile. Tokens after the last one are hidden.
FP_HOST_DEVICE u64 lane_word(const PackedMask& mask, i32 row, i32 first_token, i32 tile_kv, int lane) {
  const i32 count = min_of(tile_kv, mask.kv_len - first_token);
  u64 found = 0;
  for (i32 at = 0; at < count; at += 32) {
    const u32 exist = count - at >= 32 ? ~0u : ~(~0u << (count - at));
    found |= static_cast<u64>(bits_of_lane(mask.bits(row, first_token + at) & exist, lane)) << at / 4;
  }
  return found;
}

}  // namespace flashpage
