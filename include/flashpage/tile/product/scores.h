// The score product Q K^T of one warp: its rows with the tokens of a key tile.
#pragma once
#include "flashpage/ptx/convert.h"
#include "flashpage/ptx/ldmatrix.h"
#include "flashpage/ptx/mma.h"
#include "flashpage/tile/layout/shape.h"

namespace flashpage {

// ldmatrix gives a lane four consecutive columns of an fp8 key in one register, while a 16-bit fragment has columns 2t,
// 2t + 1 and 2t + 8, 2t + 9. The order of columns does not change the product as long as Q has the same one: in each 16
// columns, Q's pairs are 0 2 4 6 1 3 5 7.
FP_DEVICE u32 fp8_pair_order(u32 pair) { return (pair & ~7u) + (pair & 7) / 2 + (pair & 1) * 4; }

// Four keys of 8 bits as two pairs.
template <class Traits>
FP_DEVICE void widen_keys(u32 four, u32& first, u32& second) {
  using Product = typename Shape<Traits>::Product;
  if constexpr (tiles_have_formats<Traits>) {
    u32 pairs[2];
    KeyFormatOf<Traits>::template widen<Product>(four, pairs);
    first = pairs[0], second = pairs[1];
  } else {
    ptx::widen4<Product, typename Shape<Traits>::Key>(four, first, second);
  }
}

// The part of the address of Q's fragments that depends on the lane; `query` is the warp's first row.
template <class Traits>
FP_DEVICE u32 query_lane_address(u32 query, int lane) {
  return Shape<Traits>::QueryRows::lane_address(query, lane % 16, lane / 16);
}

// Loads Q's fragments of one step, one for each m16 tile.
template <class Traits>
FP_DEVICE void load_query_fragment(u32 (&a)[Shape<Traits>::row_tiles][4], u32 lane_address, int step) {
  using Rows = typename Shape<Traits>::QueryRows;
#pragma unroll
  for (int m = 0; m < Shape<Traits>::row_tiles; ++m) {
    ptx::ldmatrix_x4(a[m], Rows::at_chunk(lane_address, 2 * step) + m * 16 * Rows::stride);
  }
}

// The products of 16-bit factors, or of fp8 ones, for the tokens of tiles [begin, end). Adds to `scores`. Only every
// `distance`-th step of the columns is multiplied, from step `first` on; query_fragment and between count these alone.
template <class Traits, int begin, int end, int distance = 1, class QueryFragment, class Between, int token_tiles>
FP_DEVICE void multiply_key_tiles(float (&scores)[Shape<Traits>::row_tiles][token_tiles][4], u32 key, int lane,
                                  QueryFragment&& query_fragment, Between&& between, u32 first = 0) {
  using S = Shape<Traits>;
  using Rows = typename S::KeyRows;
  static_assert(begin % 2 == 0 && end % 2 == 0, "products of 16 tokens");
  static_assert(S::key_steps % distance == 0, "each first step begins as many");
  constexpr int steps = S::key_steps / distance;
  u32 lane_address = Rows::lane_address(key, lane % 8 + lane / 16 * 8, lane / 8 % 2);
  if constexpr (distance > 1) lane_address = Rows::at_chunk(lane_address, 2 * first);
#pragma unroll(distance == 1 ? S::key_unroll : steps)
  for (int step = 0; step < steps; ++step) {
    u32 a[S::row_tiles][4];
    query_fragment(a, step);
    between(step);
#pragma unroll
    for (int n = begin; n < end; n += 2) {
      u32 b[4];
      ptx::ldmatrix_x4(b, Rows::at_chunk(lane_address, 2 * step * distance) + n * 8 * Rows::stride);
#pragma unroll
      for (int m = 0; m < S::row_tiles; ++m) {
        ptx::mma_m16n8<typename S::Product>(scores[m][n], a[m], b[0], b[1]);
        ptx::mma_m16n8<typename S::Product>(scores[m][n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

template <int row_tiles, int token_tiles>
FP_DEVICE void clear_scores(float (&scores)[row_tiles][token_tiles][4]) {
#pragma unroll
  for (int m = 0; m < row_tiles; ++m)
#pragma unroll
    for (int n = 0; n < token_tiles; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[m][n][e] = 0.f;
}

// `key`: shared address of the tile's first token. query_fragment(a, step) provides Q's fragments; between(step) is
// other work that is spread over the products.
template <class Traits, class QueryFragment, class Between, int token_tiles>
FP_DEVICE void multiply_keys(float (&scores)[Shape<Traits>::row_tiles][token_tiles][4], u32 key, int lane,
                             QueryFragment&& query_fragment, Between&& between) {
  using S = Shape<Traits>;
  using Product = typename S::Product;
  using Rows = typename S::KeyRows;
  clear_scores(scores);
  if constexpr (S::key_bits == 16 || S::fp8_products) {
    multiply_key_tiles<Traits, 0, token_tiles>(scores, key, lane, query_fragment, between);
  } else if constexpr (token_tiles == 2) {
    // A 16-byte chunk is a whole k16 step, so one ldmatrix loads two steps of 16 tokens. If the number of steps is odd,
    // half of the last load is unused.
    u32 lane_address = Rows::lane_address(key, lane % 16, lane / 16);
#pragma unroll S::key_unroll
    for (int pair = 0; pair < ceil_div(S::key_steps, 2); ++pair) {
      u32 b[4];
      ptx::ldmatrix_x4(b, Rows::at_chunk(lane_address, 2 * pair));
#pragma unroll
      for (int step = 2 * pair; step < 2 * pair + 2; ++step) {
        if (step >= S::key_steps) continue;
        u32 a[S::row_tiles][4];
        query_fragment(a, step);
        between(step);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          u32 b0, b1;
          widen_keys<Traits>(b[step % 2 * 2 + n], b0, b1);
#pragma unroll
          for (int m = 0; m < S::row_tiles; ++m) ptx::mma_m16n8k16<Product>(scores[m][n], a[m], b0, b1);
        }
      }
    }
  } else {
    // A 16-byte chunk is a whole k16 step, so one ldmatrix loads a step of 32 tokens.
    static_assert(token_tiles % 4 == 0);
    u32 lane_address = Rows::lane_address(key, lane, 0);
#pragma unroll S::key_unroll
    for (int step = 0; step < S::key_steps; ++step) {
      u32 a[S::row_tiles][4];
      query_fragment(a, step);
      between(step);
#pragma unroll
      for (int n = 0; n < token_tiles; n += 4) {
        u32 b[4];
        ptx::ldmatrix_x4(b, Rows::at_chunk(lane_address, step) + n * 8 * Rows::stride);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          u32 b0, b1;
          widen_keys<Traits>(b[i], b0, b1);
#pragma unroll
          for (int m = 0; m < S::row_tiles; ++m) ptx::mma_m16n8k16<Product>(scores[m][n + i], a[m], b0, b1);
        }
      }
    }
  }
}

}  // namespace flashpage
