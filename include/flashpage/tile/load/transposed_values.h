// Transposes fp8 values from rows of tokens to rows of columns, in which the tensor cores take 8-bit factors.
#pragma once
#include "flashpage/ptx/convert.h"
#include "flashpage/ptx/ldmatrix.h"
#include "flashpage/ptx/stmatrix.h"
#include "flashpage/tile/layout/swizzled_rows.h"

namespace flashpage {

// Transposes a tile of V by `warps` warps, from boxes of its rows to rows of columns.
//
// In the accumulators of a score tile, a lane has two neighbouring tokens, and the next two are eight tokens later; as
// a factor of the value product it needs four neighbouring tokens. The tokens of V are ordered so that accumulators
// become factors without an exchange: of sixteen, 0 1 8 9, 2 3 10 11, 4 5 12 13, 6 7 14 15. Of sixteen columns the even
// ones come first, because a transposed register holds two tokens of two neighbouring columns; the sums have this order
// too (tile/product/values.h).
template <class Cache, int columns, int tokens, int warps>
struct TransposedValues {
  using From = SwizzledRows<Cache, columns, tokens>;
  using To = SwizzledRows<Cache, tokens, columns>;
  static constexpr int step_tokens = 32, steps = tokens / step_tokens;
  static constexpr int chunks = columns / 16;
  static constexpr int batch = chunks % 4 == 0 ? 4 : 2;  // chunks whose bytes are in registers
  static_assert(sizeof(Cache) == 1 && tokens % step_tokens == 0 && chunks % batch == 0);

  // Transposes the steps of `warp`. `from`, `to`: shared addresses of tiles.
  FP_DEVICE static void transpose(u32 from, u32 to, int warp, int lane) {
    const u32 source = From::lane_address(from, lane, 0);
    const u32 target = To::lane_address(to, lane % 16, lane / 16);
#pragma unroll 1
    for (int step = warp; step < steps; step += warps) {
      const u32 rows = source + step * step_tokens * From::stride;
      const u32 place = (target ^ step % 4 * 32) + step / 4 * To::panel_bytes;
#pragma unroll
      for (int first = 0; first < chunks; first += batch) {
        u32 words[batch][4];
#pragma unroll
        for (int i = 0; i < batch; ++i) ptx::ldmatrix_x4_trans(words[i], From::at_chunk(rows, first + i));
#pragma unroll
        for (int i = 0; i < batch; ++i) {
          const u32 transposed[4] = {
              ptx::byte_permute(words[i][0], words[i][1], 0x6420), ptx::byte_permute(words[i][0], words[i][1], 0x7531),
              ptx::byte_permute(words[i][2], words[i][3], 0x6420), ptx::byte_permute(words[i][2], words[i][3], 0x7531)};
          ptx::stmatrix_x4(place + (first + i) * 16 * To::stride, transposed);
        }
      }
    }
  }
};

}  // namespace flashpage
