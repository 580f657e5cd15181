// The value product, values += P V, of one warp, and the columns that its accumulator holds.
#pragma once
#include "flashpage/ptx/convert.h"
#include "flashpage/ptx/ldmatrix.h"
#include "flashpage/ptx/mma.h"
#include "flashpage/tile/layout/shape.h"

namespace flashpage {

// The scores after softmax as fragments of the value product, one for each step of 16 tokens, or of 32 if they are fp8:
// half or a quarter of the registers of the scores.
template <class Traits, int token_tiles>
struct Probabilities {
  using P = typename Shape<Traits>::Probability;
  static constexpr int step_tiles = is_fp8<P> ? 4 : 2, steps = token_tiles / step_tiles;
  u32 fragment[steps][Shape<Traits>::row_tiles][4];

  Probabilities() = default;
  FP_DEVICE explicit Probabilities(const float (&scores)[Shape<Traits>::row_tiles][token_tiles][4]) {
#pragma unroll
    for (int step = 0; step < steps; ++step)
#pragma unroll
      for (int m = 0; m < Shape<Traits>::row_tiles; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int n = step * step_tiles + i / 2 * (step_tiles / 2), e = i % 2 * 2;
          if constexpr (is_fp8<P>) {
            // Two of the lane's tokens in one n8 tile and two in the next, as in tile/load/transposed_values.h.
            const float (&first)[4] = scores[m][n], (&second)[4] = scores[m][n + 1];
            fragment[step][m][i] = ptx::pack4<P>(first[e], first[e + 1], second[e], second[e + 1]);
          } else {
            fragment[step][m][i] = ptx::pack2<P>(scores[m][n][e], scores[m][n][e + 1]);
          }
        }
  }
};

// Four values of 8 bits as two pairs.
template <class Traits>
FP_DEVICE void widen_values(u32 four, u32& first, u32& second) {
  using P = typename Shape<Traits>::Probability;
  if constexpr (tiles_have_formats<Traits>) {
    u32 pairs[2];
    ValueFormatOf<Traits>::template widen<P>(four, pairs);
    first = pairs[0], second = pairs[1];
  } else {
    ptx::widen4<P, typename Shape<Traits>::Cache>(four, first, second);
  }
}

// The number of times that multiply_values calls between().
template <class Traits, int token_tiles>
inline constexpr int value_steps = Shape<Traits>::fp8_products ? Shape<Traits>::ValueRows::chunks : token_tiles / 2;

// `value`: shared address of the tile's first token. between(step) is other work that is spread over the products.
template <class Traits, class Between, int token_tiles>
  requires(!Shape<Traits>::fp8_products)
FP_DEVICE void multiply_values(float (&values)[Shape<Traits>::row_tiles][Shape<Traits>::value_tiles][4],
                               const Probabilities<Traits, token_tiles>& probabilities, u32 value, int lane,
                               Between&& between) {
  using S = Shape<Traits>;
  using Rows = typename S::ValueRows;
  using P = typename S::Probability;
  // 8 columns of 16 bits, or 16 of 8 bits, are one chunk. ldmatrix loads two chunks of 16 tokens; if the number of
  // chunks is odd, half of the last load is unused.
  constexpr int chunks = Rows::chunks;
  u32 lane_address = Rows::lane_address(value, lane % 16, lane / 16);
#pragma unroll
  for (int step = 0; step < token_tiles / 2; ++step) {
    const u32(&a)[S::row_tiles][4] = probabilities.fragment[step];
    between(step);
#pragma unroll
    for (int chunk = 0; chunk < chunks; chunk += 2) {
      u32 b[4];
      ptx::ldmatrix_x4_trans(b, Rows::at_chunk(lane_address, chunk) + step * 16 * Rows::stride);
      if constexpr (S::Formats::value_bits == 16) {
#pragma unroll
        for (int m = 0; m < S::row_tiles; ++m) {
          ptx::mma_m16n8k16<P>(values[m][chunk], a[m], b[0], b[1]);
          ptx::mma_m16n8k16<P>(values[m][chunk + 1], a[m], b[2], b[3]);
        }
      } else {
        // A transposed register holds two tokens of two neighbouring columns: even columns go to one n8 tile, odd ones
        // to the next.
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (i >= 2 && chunk + 1 >= chunks) continue;
          u32 pair = ptx::byte_permute(b[i / 2 * 2], b[i / 2 * 2 + 1], i % 2 ? 0x7531 : 0x6420);
          u32 b0, b1;
          widen_values<Traits>(pair, b0, b1);
#pragma unroll
          for (int m = 0; m < S::row_tiles; ++m) ptx::mma_m16n8k16<P>(values[m][2 * chunk + i], a[m], b0, b1);
        }
      }
    }
  }
}

// As above, for fp8 probabilities and values. A transposed register holds two tokens of two neighbouring columns, so
// that even columns make one n8 tile and odd ones the next. Tensor cores cut off the low bits of sums of fp8 products
// towards zero, so each tile has sums of its own, which are added in fp32. ptxas begins the products of many chunks
// early, for whose sums more than 224 columns leave no registers; it moves no load across a __syncwarp.
template <class Traits, class Between, int token_tiles>
  requires(Shape<Traits>::fp8_products)
FP_DEVICE void multiply_values(float (&values)[Shape<Traits>::row_tiles][Shape<Traits>::value_tiles][4],
                               const Probabilities<Traits, token_tiles>& probabilities, u32 value, int lane,
                               Between&& between) {
  using S = Shape<Traits>;
  using Rows = typename S::ValueRows;
  using P = typename S::Probability;
  const u32 lane_address = Rows::lane_address(value, lane, 0);
#pragma unroll
  for (int chunk = 0; chunk < Rows::chunks; ++chunk) {
    between(chunk);
    if (S::value_tiles > 28 && chunk % 4 == 0) __syncwarp();
    float sums[S::row_tiles][2][4] = {};
#pragma unroll
    for (int step = 0; step < probabilities.steps; ++step) {
      u32 words[4];
      ptx::ldmatrix_x4_trans(words, Rows::at_chunk(lane_address, chunk) + step * 32 * Rows::stride);
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const u32 b0 = ptx::byte_permute(words[0], words[1], odd ? 0x7531 : 0x6420);
        const u32 b1 = ptx::byte_permute(words[2], words[3], odd ? 0x7531 : 0x6420);
#pragma unroll
        for (int m = 0; m < S::row_tiles; ++m)
          ptx::mma_m16n8k32<P>(sums[m][odd], probabilities.fragment[step][m], b0, b1);
      }
    }
#pragma unroll
    for (int m = 0; m < S::row_tiles; ++m)
#pragma unroll
      for (int i = 0; i < 8; ++i) values[m][2 * chunk + i / 4][i % 4] += sums[m][i / 4][i % 4];
  }
}

// Calls store(column, first, second) for every pair of neighbouring columns that this lane holds in two neighbouring n8
// tiles of one of its rows (half 0: lane / 4, half 1: lane / 4 + 8). `pair`: number of the pair; columns count from 16
// times it.
template <class Traits, class Store>
FP_DEVICE void for_each_column_of_pair(const float (&even)[4], const float (&odd)[4], int pair, int half, int lane,
                                       Store&& store) {
  int t = lane % 4, e = half * 2;
  if constexpr (Shape<Traits>::Formats::value_bits == 4 &&
                !Shape<Traits>::swaps) {  // two pairs have the columns of 32 (tile/product/four_bits.h)
    const int first = t * 8 + pair % 2 * (2 - 16);
    store(first, even[e], odd[e]);
    store(first + 4, even[e + 1], odd[e + 1]);
  } else if constexpr (Shape<Traits>::Formats::value_bits < 16) {
    store(t * 4, even[e], odd[e]);
    store(t * 4 + 2, even[e + 1], odd[e + 1]);
  } else {
    store(t * 2, even[e], even[e + 1]);
    store(8 + t * 2, odd[e], odd[e + 1]);
  }
}

// As for_each_column_of_pair, for all tiles of the row; columns that do not exist are left out.
template <class Traits, class Store>
FP_DEVICE void for_each_column_pair(const float (&row_tile)[Shape<Traits>::value_tiles][4], int half, int lane,
                                    Store&& store) {
  using S = Shape<Traits>;
#pragma unroll
  for (int n = 0; n < S::value_tiles; n += 2) {
    for_each_column_of_pair<Traits>(row_tile[n], row_tile[n + 1], n / 2, half, lane,
                                    [&](int at, float first, float second) {
                                      if (n * 8 + at < S::value_columns) store(n * 8 + at, first, second);
                                    });
  }
}

}  // namespace flashpage
