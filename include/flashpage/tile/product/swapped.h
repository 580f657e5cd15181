// Products of at most eight query rows with keys and values of four bits, with the factors swapped: K Q^T and V^T P^T.
// The tensor core's 16 rows are then tokens, or columns of V, where the usual order would leave at least eight empty:
// products, scores, accumulators and Q take half of the instructions and registers.
//
// A lane has the scores of query rows 2 * (lane % 4) + {0, 1} with tokens lane / 4 and lane / 4 + 8 of 16, and of the
// same rows values 4 * (lane / 4) + {0, 1, 2, 3} of each 32 columns.
#pragma once
#include "flashpage/ptx/movmatrix.h"
#include "flashpage/tile/product/four_bits.h"

namespace flashpage {

// Q's fragments, as FourBitQuery has them, of eight rows.
template <class Traits>
struct SwappedQuery {
  using S = Shape<Traits>;
  using Rows = typename S::QueryRows;
  u32 fragment[S::key_steps][2];

  // `query`: shared address of the unit's first row.
  FP_DEVICE SwappedQuery(u32 query, int lane) {
#pragma unroll
    for (int step = 0; step < S::key_steps; step += 2) {
      u32 words[4];  // eight consecutive columns
      ptx::load_shared(words, query + Rows::chunk_offset(lane / 4, step * 2 + lane % 4));
      fragment[step][0] = ptx::byte_permute(words[0], words[2], 0x5410);
      fragment[step][1] = ptx::byte_permute(words[0], words[2], 0x7632);
      fragment[step + 1][0] = ptx::byte_permute(words[1], words[3], 0x5410);
      fragment[step + 1][1] = ptx::byte_permute(words[1], words[3], 0x7632);
    }
  }
};

// scores = K Q^T. `scales`: shared address of the scales of the tile's first token.
template <class Traits, int row_tiles>
FP_DEVICE void multiply_keys_swapped(float (&scores)[row_tiles][4], const SwappedQuery<Traits>& query, u32 key,
                                     u32 scales, int lane) {
  using Rows = typename Shape<Traits>::KeyRows;
  static_assert(row_tiles % 2 == 0);
#pragma unroll
  for (int m = 0; m < row_tiles; ++m)
#pragma unroll
    for (int e = 0; e < 4; ++e) scores[m][e] = 0.f;
  const u32 lane_address = Rows::lane_address(key, lane, 0);
#pragma unroll
  for (int m = 0; m < row_tiles; m += 2) {
    const FourBitKeys<Traits> keys(scales + m * 16 * FourBitKeys<Traits>::bytes, lane);
#pragma unroll
    for (int chunk = 0; chunk < Rows::chunks; ++chunk) {
      u32 words[4], pairs[4][4];
      ptx::ldmatrix_x4(words, Rows::at_chunk(lane_address, chunk) + m * 16 * Rows::stride);
#pragma unroll
      for (int i = 0; i < 4; ++i) keys.widen(words[i], pairs[i], i, chunk);
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        const u32(&b)[2] = query.fragment[2 * chunk + step];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const u32 a[4] = {pairs[2 * i][2 * step], pairs[2 * i + 1][2 * step], pairs[2 * i][2 * step + 1],
                            pairs[2 * i + 1][2 * step + 1]};
          ptx::mma_m16n8k16<Half>(scores[m + i], a, b[0], b[1]);
        }
      }
    }
  }
}

// values += V^T P^T, for the probabilities of one tile of tokens.
template <class Traits, int column_tiles, int row_tiles>
FP_DEVICE void multiply_values_swapped(float (&values)[column_tiles][4], const float (&probabilities)[row_tiles][4],
                                       u32 value, u32 scales, int lane) {
  using Rows = typename Shape<Traits>::ValueRows;
  static_assert(column_tiles == 2 * Rows::chunks && Rows::chunks % 2 == 0);
  const u32 lane_address = Rows::lane_address(value, lane % 16, lane / 16);
#pragma unroll
  for (int step = 0; step < row_tiles; ++step) {
    const float (&p)[4] = probabilities[step];
    const u32 b0 = ptx::transpose_matrix(ptx::pack2<Half>(p[0], p[1]));
    const u32 b1 = ptx::transpose_matrix(ptx::pack2<Half>(p[2], p[3]));
    const FourBitValues<Traits> of_tokens(scales + step * 16 * FourBitValues<Traits>::bytes, lane);
#pragma unroll
    for (int chunk = 0; chunk < Rows::chunks; chunk += 2) {
      u32 words[4];
      ptx::ldmatrix_x4_trans(words, Rows::at_chunk(lane_address, chunk) + step * 16 * Rows::stride);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        u32 low[4], high[4];
        of_tokens.widen(words[2 * i], low, 0, chunk + i);
        of_tokens.widen(words[2 * i + 1], high, 1, chunk + i);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const u32 a[4] = {low[2 * half], low[2 * half + 1], high[2 * half], high[2 * half + 1]};
          ptx::mma_m16n8k16<Half>(values[2 * (chunk + i) + half], a, b0, b1);
        }
      }
    }
  }
}

}  // namespace flashpage
