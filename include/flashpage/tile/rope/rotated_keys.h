// Scores of rotated queries and keys. Keys are rotated in registers on their way to the tensor cores: a k16 step takes
// eight columns of the lower half and their partners, so that a lane holds both columns of each pair.
#pragma once
#include "flashpage/ptx/convert.h"
#include "flashpage/ptx/ldmatrix.h"
#include "flashpage/ptx/mma.h"
#include "flashpage/tile/layout/chunk_pairs.h"
#include "flashpage/tile/load/query.h"
#include "flashpage/tile/rope/rotation.h"

namespace flashpage {

// As rotate_pairs, in fp16: for fp8 keys under bf16 queries.
FP_DEVICE void rotate_halves(u32& low, u32& high, const RotationPair& rotation) {
  u32 cosine = ptx::pack2<Half>(rotation.first.cosine, rotation.second.cosine);
  u32 sine = ptx::pack2<Half>(rotation.first.sine, rotation.second.sine);
  u32 rotated = ptx::negative_fma_half2(high, sine, ptx::mul_half2(low, cosine));
  high = ptx::fma_half2(low, sine, ptx::mul_half2(high, cosine));
  low = rotated;
}

// Rotates a unit's query rows in place, by all `threads`; the caller has a barrier before and after.
template <class Traits>
FP_DEVICE void rotate_query_by_table(u8* tile, const RotationTable<Traits>& table, const AttentionParams& params,
                                     const WorkItem& item, const Unit& unit, int thread) {
  using S = Shape<Traits>;
  using Query = typename S::Query;
  constexpr int pairs = Traits::head_dim_qk / 4;  // of columns, in each half
  auto address = [&](int row, int pair) {
    u32 at = query_follows_bytes<Traits> ? fp8_pair_order(pair) : pair;
    return reinterpret_cast<u32*>(tile + S::QueryRows::byte_offset(row, at * 4));
  };
  for (int i = thread; i < unit.num_rows * pairs; i += S::threads) {
    int row = i / pairs, pair = i % pairs;
    i32 position = query_position(item, unpack_row(params, unit.kv_head, unit.first_row + row).row);
    rotate_pairs<Query, Query>(*address(row, pair), *address(row, pair + pairs),
                               table.at(pair * 2, static_cast<float>(position)));
  }
}

// The lane's keys in both halves, fp8 widened to fp16: two neighbouring columns of tokens lane / 4 and 8 + lane / 4 of
// sixteen.
template <class Traits>
struct KeyHalves {
  using S = Shape<Traits>;
  using Cache = typename S::Cache;
  using Rows = typename S::CacheKeyRows;
  using Wide = typename select_type<is_fp8<Cache>, Half, Cache>::type;
  using Table = RotationTable<Traits>;
  static constexpr int chunk_columns = 16 / static_cast<int>(sizeof(Cache));
  // Otherwise pairs have different positions in their chunks, which one ldmatrix cannot load together.
  static constexpr bool by_chunk = Table::half % chunk_columns == 0;
  using Chunks = ChunkPairs<Rows, Table::half / chunk_columns>;

  u32 tile;
  int lane;
  int row = lane % 8 + lane / 16 * 8, second = lane / 8 % 2;  // the row and chunk that the lane addresses for ldmatrix
  u32 lane_address = Chunks::lane_address(tile, row, second);

  FP_DEVICE KeyHalves(u32 tile, int lane) : tile(tile), lane(lane) {}

  // Loads the tokens from 8 * token_tile on.
  FP_DEVICE void load(u32 (&low)[2], u32 (&high)[2], int step, int token_tile) const {
    if constexpr (by_chunk) {
      u32 b[4];
      const int chunk = Table::bytes_order ? step / 2 : step, shift = Table::bytes_order ? step % 2 * 16 : 0;
      ptx::ldmatrix_x4(b, Chunks::at(lane_address, row, second, chunk) + token_tile * 8 * Rows::stride);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        low[i] = widen(b[2 * i] >> shift);
        high[i] = widen(b[2 * i + 1] >> shift);
      }
    } else {
      const int column = Table::column(step, lane);
      auto at = [&](int i, int of) {
        // fp8 pairs begin on any even byte.
        u32 byte = of * sizeof(Cache);
        u32 word = ptx::load_shared(tile + Rows::byte_offset((token_tile + i) * 8 + lane / 4, byte & ~3u));
        return widen(word >> (byte & 3) * 8);
      };
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        low[i] = at(i, column);
        high[i] = at(i, column + Table::half);
      }
    }
  }

 private:
  FP_DEVICE static u32 widen(u32 pair) {
    if constexpr (is_fp8<Cache>) {
      u32 wide, unused;
      ptx::widen4<Half, Cache>(pair, wide, unused);
      return wide;
    } else {
      return pair;
    }
  }
};

// As multiply_keys, with keys that are rotated on the way; `origin` is the rotation of the first one. Scores come out
// multiplied by RotationTable::key_scale.
template <class Traits, class QueryFragment, int token_tiles>
FP_DEVICE void multiply_rotated_keys(float (&scores)[1][token_tiles][4], u32 tile, int lane,
                                     QueryFragment&& query_fragment, const RotationTable<Traits>& table,
                                     const SpreadRotations<Traits>& origin) {
  using S = Shape<Traits>;
  using Product = typename S::Product;
  constexpr int eighths = ceil_div(S::key_steps, 8), unroll = S::query_in_registers ? 8 : 4;
  using Wide = typename KeyHalves<Traits>::Wide;
  const KeyHalves<Traits> keys(tile, lane);
#pragma unroll
  for (int n = 0; n < token_tiles; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) scores[0][n][e] = 0.f;
#pragma unroll
  for (int eighth = 0; eighth < eighths; ++eighth) {
    const int steps = min_of(8, S::key_steps - eighth * 8);
#pragma unroll unroll
    for (int i = 0; i < steps; ++i) {
      const int step = eighth * 8 + i;
      u32 a[1][4];
      query_fragment(a, step);
      RotationPair rotation = origin.of(eighth, i, lane) * table.rotations[step][lane];
      const RotationPair eight = table.rotations[step][32 + lane % 4];
#pragma unroll
      for (int n = 0; n < token_tiles; n += 2) {
        u32 low[2], high[2];
        keys.load(low, high, step, n);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          if (n + j > 0) rotation = rotation * eight;
          if constexpr (S::rotate_in_half && is_same<Product, Half>) {
            rotate_halves(low[j], high[j], rotation);
          } else {
            rotate_pairs<Wide, Product>(low[j], high[j], rotation);
          }
          ptx::mma_m16n8k16<Product>(scores[0][n + j], a[0], low[j], high[j]);
        }
      }
    }
  }
}

}  // namespace flashpage
