// Prefetches the bits of a mixed tile to the L1, so that computing warps do not wait for the L2.
#pragma once
#include "flashpage/ptx/prefetch.h"
#include "flashpage/tile/mask/lane_bits.h"
#include "flashpage/tile/unit.h"

namespace flashpage {

// Called by a whole warp, for the rows of a unit that belong to the CTA. They begin at `cta_row`.
FP_DEVICE void prefetch_bits(const AttentionParams& params, const LaneBits& bits, const Unit& unit, int cta_row,
                             i32 tile, int lane) {
  const i32 end = unit.first_row + min_of(unit.num_rows, cta_row + params.cta_rows);
  const i32 last_row = params.group.div(end - 1);
#pragma unroll 1
  for (i32 row = params.group.div(unit.first_row + cta_row) + lane; row <= last_row; row += 32)
    ptx::prefetch_to_l1(bits.quad(row, tile));
}

}  // namespace flashpage
