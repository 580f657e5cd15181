// Bits of a mixed tile on their way to the L1, before computing warps want them: they would have nothing else to do
// until the L2 has answered.
#pragma once
#include "flashpage/ptx/prefetch.h"
#include "flashpage/tile/mask/lane_bits.h"
#include "flashpage/tile/unit.h"

namespace flashpage {

// By a warp: those of a CTA's rows of a unit, which begin at `cta_row`.
FP_DEVICE void ask_for_bits(const AttentionParams& params, const LaneBits& bits, const Unit& unit, int cta_row,
                            i32 tile, int lane) {
  const i32 end = unit.first_row + min_of(unit.num_rows, cta_row + params.cta_rows);
  const i32 last_row = params.group.div(end - 1);
#pragma unroll 1
  for (i32 row = params.group.div(unit.first_row + cta_row) + lane; row <= last_row; row += 32)
    ptx::prefetch_to_l1(bits.quad(row, tile));
}

}  // namespace flashpage
