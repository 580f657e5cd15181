// Values column by column, as in vLLM's cache of blocks: a tile in shared memory, and its product. Columns are what the
// tensor core reads of its second factor, so nothing is transposed.
#pragma once
#include "flashpage/ptx/convert.h"
#include "flashpage/ptx/ldmatrix.h"
#include "flashpage/ptx/mma.h"
#include "flashpage/tile/product/values.h"

namespace flashpage {

// Column after column, each with `tokens` tokens in units of 16 bytes. Eight neighbouring columns use eight different
// bank groups, and so do any eight units that are loaded together.
template <class Element, int columns, int tokens>
struct ValueColumns {
  static constexpr int stride = tokens * static_cast<int>(sizeof(Element));  // bytes from column to column
  static constexpr int units = stride / 16;
  static constexpr int tile_bytes = round_up(columns, 16) * stride;
  static_assert(units == 2 || units == 4);

  FP_DEVICE static u32 byte_offset(u32 column, u32 byte) {
    u32 unit_xor = column / (8 / units) % units;  // repeats every eight columns
    if constexpr (units == 4) unit_xor = unit_xor % 2 * 2 + unit_xor / 2;
    return column * stride + (byte / 16 ^ unit_xor) * 16 + byte % 16;
  }
};

// The order of tokens does not change the product as long as probabilities and values have the same one. A register of
// an fp8 column's matrix holds four consecutive tokens, while a fragment takes tokens 2t, 2t + 1 and 2t + 8, 2t + 9 of
// 16. Keys, and with them scores, lie in the shared tile in the order that makes up for this.
template <class Element>
FP_DEVICE int row_of_token(int token) {
  if constexpr (!is_fp8<Element>) return token;
  return (token & ~15) + token / 4 % 4 * 2 + token / 2 % 2 * 8 + token % 2;
}

// The token in the tile that belongs to this lane's score `element` (0 or 1 of the row's two) in an n8 tile.
template <class Element>
FP_DEVICE int token_of_score(int tile, int element, int lane) {
  if constexpr (!is_fp8<Element>) return tile * 8 + lane % 4 * 2 + element;
  return tile / 2 * 16 + lane % 4 * 4 + tile % 2 * 2 + element;
}

// values += P V. `value`: shared address of the tile.
template <class Traits, int token_tiles>
FP_DEVICE void multiply_value_columns(float (&values)[Shape<Traits>::row_tiles][Shape<Traits>::value_tiles][4],
                                      const Probabilities<Traits, token_tiles>& probabilities, u32 value, int lane) {
  using S = Shape<Traits>;
  using Cache = typename S::Cache;
  using Columns = ValueColumns<Cache, S::value_columns, token_tiles * 8>;
  using P = typename S::Probability;
  // Four matrices: two units of eight columns, then the same units of the next eight.
  const u32 lane_address = value + Columns::byte_offset(lane % 8 + lane / 16 * 8, lane / 8 % 2 * 16);
#pragma unroll
  for (int n = 0; n < S::value_tiles; n += 2) {
#pragma unroll
    for (int pair = 0; pair < Columns::units / 2; ++pair) {
      u32 b[4];
      ptx::ldmatrix_x4(b, (lane_address ^ pair * 32) + n * 8 * Columns::stride);
      if constexpr (!is_fp8<Cache>) {
#pragma unroll
        for (int m = 0; m < S::row_tiles; ++m) {
          ptx::mma_m16n8k16<P>(values[m][n], probabilities.fragment[pair][m], b[0], b[1]);
          ptx::mma_m16n8k16<P>(values[m][n + 1], probabilities.fragment[pair][m], b[2], b[3]);
        }
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          u32 b0, b1;
          ptx::widen4<P, Cache>(b[i], b0, b1);
#pragma unroll
          for (int m = 0; m < S::row_tiles; ++m)
            ptx::mma_m16n8k16<P>(values[m][n + i / 2], probabilities.fragment[2 * pair + i % 2][m], b0, b1);
        }
      }
    }
  }
}

}  // namespace flashpage
