// Bits of a custom mask on their way to the L1, before computing warps want those of a tile: they would have nothing
// else to do until the L2 has answered.
#pragma once
#include "flashpage/ptx/prefetch.h"
#include "flashpage/tile/unit.h"

namespace flashpage {

// By a warp: what MaskBits (tile/mask.h) reads of a tile for a CTA's rows of a unit, which begin at `cta_row`. Nothing
// outside the request's bytes.
template <int tokens>
FP_DEVICE void ask_for_bits(const AttentionParams& params, const WorkItem& item, const Unit& unit, int cta_row,
                            i32 first_token, int lane) {
  if (first_token >= item.kv_len) return;
  const u8* begin = params.custom_mask + item.mask_offset;
  const i64 last_byte = (static_cast<i64>(item.q_len) * item.kv_len - 1) >> 3;
  if (lane == 0) ptx::prefetch_to_l1(begin + last_byte);  // read with any tile
  const i32 end = unit.first_row + min_of(unit.num_rows, cta_row + params.cta_rows);
  const i32 last_row = params.group.div(end - 1);
  // A row's first word and its last one, as bits start inside a word: they lie in at most two pieces of 32 bytes.
  constexpr int behind = 4 * max_of(4, ceil_div(tokens, 32));
  static_assert(behind <= 32);
#pragma unroll 1
  for (i32 row = params.group.div(unit.first_row + cta_row) + lane / 2; row <= last_row; row += 16) {
    const i64 byte = (static_cast<i64>(row) * item.kv_len + first_token) >> 3;
    ptx::prefetch_to_l1(begin + min_of(byte + lane % 2 * behind, last_byte));
  }
}

}  // namespace flashpage
