// Products of at most eight query rows with keys and values of four or eight bits, with the factors swapped: K Q^T and
// V^T P^T. The tensor core's 16 rows are then tokens, or columns of V, where the usual order would leave at least eight
// empty: products, scores, accumulators and Q take half of the instructions and registers.
//
// A lane has the scores of query rows 2 * (lane % 4) + {0, 1} with tokens lane / 4 and lane / 4 + 8 of 16, and of the
// same rows values 4 * (lane / 4) + {0, 1, 2, 3} of each 32 columns, or with eight bits 2 * (lane / 4) + {0, 1} of each
// 16.
#pragma once
#include "flashpage/ptx/movmatrix.h"
#include "flashpage/tile/product/four_bits.h"
#include "flashpage/tile/product/scores.h"
#include "flashpage/tile/product/values.h"

namespace flashpage {

// Q's fragments of eight rows, in the order of the keys' columns: as FourBitQuery has them, or by fp8_pair_order.
template <class Traits>
struct SwappedQuery {
  using S = Shape<Traits>;
  using Rows = typename S::QueryRows;
  u32 fragment[S::key_steps][2];

  // `query`: shared address of the unit's first row.
  FP_DEVICE SwappedQuery(u32 query, int lane)
    requires(S::key_bits == 8)
  {
#pragma unroll
    for (int step = 0; step < S::key_steps; step += 2) {
      u32 words[4];  // of two steps, or of the last one twice
      const int chunk = 2 * min_of(step + lane / 16, S::key_steps - 1) + lane / 8 % 2;
      ptx::ldmatrix_x4(words, query + Rows::chunk_offset(lane % 8, chunk));
#pragma unroll
      for (int i = 0; i < min_of(4, 2 * (S::key_steps - step)); ++i) fragment[step + i / 2][i % 2] = words[i];
    }
  }
  FP_DEVICE SwappedQuery(u32 query, int lane)
    requires(S::key_bits == 4)
  {
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
  requires(Shape<Traits>::key_bits == 4)
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

// As above, for keys of eight bits; scales of tokens are applied to scores.
template <class Traits, int row_tiles>
  requires(Shape<Traits>::key_bits == 8)
FP_DEVICE void multiply_keys_swapped(float (&scores)[row_tiles][4], const SwappedQuery<Traits>& query, u32 key, u32,
                                     int lane) {
  using Rows = typename Shape<Traits>::KeyRows;
  static_assert(row_tiles % 2 == 0);
#pragma unroll
  for (int m = 0; m < row_tiles; ++m)
#pragma unroll
    for (int e = 0; e < 4; ++e) scores[m][e] = 0.f;
  const u32 lane_address = Rows::lane_address(key, lane, 0);
#pragma unroll
  for (int m = 0; m < row_tiles; m += 2)
#pragma unroll
    for (int step = 0; step < Shape<Traits>::key_steps; ++step) {
      u32 words[4], pairs[4][2];  // of eight tokens each
      ptx::ldmatrix_x4(words, Rows::at_chunk(lane_address, step) + m * 16 * Rows::stride);
#pragma unroll
      for (int i = 0; i < 4; ++i) widen_keys<Traits>(words[i], pairs[i][0], pairs[i][1]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const u32 a[4] = {pairs[2 * i][0], pairs[2 * i + 1][0], pairs[2 * i][1], pairs[2 * i + 1][1]};
        ptx::mma_m16n8k16<Half>(scores[m + i], a, query.fragment[step][0], query.fragment[step][1]);
      }
    }
}

// The probabilities of 16 tokens as the right factor.
struct SwappedProbabilities {
  u32 b[2];

  FP_DEVICE explicit SwappedProbabilities(const float (&p)[4])
      : b{ptx::transpose_matrix(ptx::pack2<Half>(p[0], p[1])), ptx::transpose_matrix(ptx::pack2<Half>(p[2], p[3]))} {}
};

// values += V^T P^T, for the probabilities of one tile of tokens.
template <class Traits, int column_tiles, int row_tiles>
  requires(Shape<Traits>::Formats::value_bits == 4)
FP_DEVICE void multiply_values_swapped(float (&values)[column_tiles][4], const float (&probabilities)[row_tiles][4],
                                       u32 value, u32 scales, int lane) {
  using Rows = typename Shape<Traits>::ValueRows;
  static_assert(column_tiles == 2 * Rows::chunks && Rows::chunks % 2 == 0);
  const u32 lane_address = Rows::lane_address(value, lane % 16, lane / 16);
#pragma unroll
  for (int step = 0; step < row_tiles; ++step) {
    const SwappedProbabilities right(probabilities[step]);
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
          ptx::mma_m16n8k16<Half>(values[2 * (chunk + i) + half], a, right.b[0], right.b[1]);
        }
      }
    }
  }
}

// As above, for values of eight bits; scales of tokens are applied to probabilities.
template <class Traits, int column_tiles, int row_tiles>
  requires(Shape<Traits>::Formats::value_bits == 8)
FP_DEVICE void multiply_values_swapped(float (&values)[column_tiles][4], const float (&probabilities)[row_tiles][4],
                                       u32 value, u32, int lane) {
  using Rows = typename Shape<Traits>::ValueRows;
  static_assert(column_tiles == Rows::chunks);
  const u32 lane_address = Rows::lane_address(value, lane % 16, lane / 16);
#pragma unroll
  for (int step = 0; step < row_tiles; ++step) {
    const SwappedProbabilities right(probabilities[step]);
#pragma unroll
    for (int chunk = 0; chunk < Rows::chunks; chunk += 2) {
      u32 words[4];  // two neighbouring columns of two tokens; half of the last ones are unused if chunks are odd
      ptx::ldmatrix_x4_trans(words, Rows::at_chunk(lane_address, chunk) + step * 16 * Rows::stride);
#pragma unroll
      for (int i = 0; i < min_of(2, Rows::chunks - chunk); ++i) {
        u32 a[4];  // even columns are the first eight rows of the left factor, odd ones the others
        widen_values<Traits>(ptx::byte_permute(words[2 * i], words[2 * i + 1], 0x6420), a[0], a[2]);
        widen_values<Traits>(ptx::byte_permute(words[2 * i], words[2 * i + 1], 0x7531), a[1], a[3]);
        ptx::mma_m16n8k16<Half>(values[chunk + i], a, right.b[0], right.b[1]);
      }
    }
  }
}

}  // namespace flashpage
