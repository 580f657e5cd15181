// scores = Q K^T of one warp: its rows against the tokens of a key tile.
#pragma once
#include "flashpage/ptx/convert.h"
#include "flashpage/ptx/ldmatrix.h"
#include "flashpage/ptx/mma.h"
#include "flashpage/tile/shape.h"

namespace flashpage {

// An fp8 key's four neighbouring columns land in one register of ldmatrix, where a 16-bit fragment has columns 2t, 2t + 1 and
// 2t + 8, 2t + 9. The product does not care about the order of columns as long as Q has the same one: within 16 columns, Q's
// pairs 0 2 4 6 1 3 5 7.
FP_DEVICE u32 fp8_pair_order(u32 pair) { return (pair & 8 ? 8 : 0) + (pair & 7) / 2 + (pair & 1) * 4; }

// Q's fragments of one k16 step, m16 tile by m16 tile.
template <class Traits>
FP_DEVICE void load_query_fragment(u32 (&a)[Shape<Traits>::row_tiles][4], u32 query, int step, int lane) {
  using S = Shape<Traits>;
#pragma unroll
  for (int m = 0; m < S::row_tiles; ++m) {
    ptx::ldmatrix_x4(a[m], query + m * 16 * S::QueryRows::stride + S::QueryRows::chunk_offset(lane % 16, 2 * step + lane / 16));
  }
}

// `query`: shared address of the warp's first row; `key`: of the tile's first token. query_fragment(a, step) delivers Q.
template <class Traits, class QueryFragment, int token_tiles>
FP_DEVICE void multiply_keys(float (&scores)[Shape<Traits>::row_tiles][token_tiles][4], u32 key, int lane,
                             QueryFragment&& query_fragment) {
  using S = Shape<Traits>;
  using Query = typename S::Query;
  u32 token = lane % 8 + lane / 16 * 8, half = lane / 8 % 2;
#pragma unroll
  for (int m = 0; m < S::row_tiles; ++m)
#pragma unroll
    for (int n = 0; n < token_tiles; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[m][n][e] = 0.f;

  if constexpr (!is_fp8<typename S::Key>) {
#pragma unroll
    for (int step = 0; step < S::key_steps; ++step) {
      u32 a[S::row_tiles][4];
      query_fragment(a, step);
#pragma unroll
      for (int n = 0; n < token_tiles; n += 2) {
        u32 b[4];
        ptx::ldmatrix_x4(b, key + n * 8 * S::KeyRows::stride + S::KeyRows::chunk_offset(token, 2 * step + half));
#pragma unroll
        for (int m = 0; m < S::row_tiles; ++m) {
          ptx::mma_m16n8k16<Query>(scores[m][n], a[m], b[0], b[1]);
          ptx::mma_m16n8k16<Query>(scores[m][n + 1], a[m], b[2], b[3]);
        }
      }
    }
  } else {
    // A 16-byte chunk is a whole k16 step: one ldmatrix serves two steps (the odd last one reads its own chunk twice).
#pragma unroll
    for (int step = 0; step < S::key_steps; step += 2) {
      constexpr int last = S::key_steps - 1;
      u32 a[2][S::row_tiles][4];
      query_fragment(a[0], step);
      if (step < last) query_fragment(a[1], step + 1);
#pragma unroll
      for (int n = 0; n < token_tiles; n += 2) {
        u32 b[4];
        u32 chunk = step < last ? step + half : step;
        ptx::ldmatrix_x4(b, key + n * 8 * S::KeyRows::stride + S::KeyRows::chunk_offset(token, chunk));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (i % 2 == 1 && step == last) continue;
          u32 b0, b1;
          ptx::widen4<Query, typename S::Key>(b[i], b0, b1);
#pragma unroll
          for (int m = 0; m < S::row_tiles; ++m) ptx::mma_m16n8k16<Query>(scores[m][n + i / 2], a[i % 2][m], b0, b1);
        }
      }
    }
  }
}

}  // namespace flashpage
