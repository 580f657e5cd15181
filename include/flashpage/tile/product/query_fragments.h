// Q's fragments for the score product, step by step: kept in registers, or loaded from shared memory for each step.
#pragma once
#include "flashpage/ptx/compiler.h"
#include "flashpage/ptx/shared.h"
#include "flashpage/tile/layout/chunk_pairs.h"
#include "flashpage/tile/product/four_bits.h"
#include "flashpage/tile/product/scores.h"

namespace flashpage {

// Q for the steps of tile/rope/rotated_keys.h: eight columns of the lower half and their partners.
template <class Traits>
struct PairedQuery {
  using Rows = typename Shape<Traits>::QueryRows;
  static constexpr int half = Traits::head_dim_qk / 2;
  static constexpr bool by_chunk = half % 8 == 0;
  using Chunks = ChunkPairs<Rows, half / 8>;

  FP_DEVICE static u32 lane_address(u32 query, int lane) {
    return by_chunk ? Chunks::lane_address(query, lane % 16, lane / 16) : query;
  }

  FP_DEVICE static void load(u32 (&a)[1][4], u32 lane_address, int lane, int step) {
    if constexpr (by_chunk) {
      ptx::ldmatrix_x4(a[0], Chunks::at(lane_address, lane % 16, lane / 16, step));
    } else {
      const int column = step * 8 + lane % 4 * 2;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        u32 at = Rows::byte_offset(lane / 4 + i % 2 * 8, (column + i / 2 * half) * 2);
        a[0][i] = column < half ? ptx::load_shared(lane_address + at) : 0;
      }
    }
  }
};

// Where a kernel keeps Q's fragments; `at` is lane_address of the warp's first row.
template <class Traits, bool in_registers>
struct QueryFragments {
  using S = Shape<Traits>;
  static constexpr bool paired = S::rotate && S::swizzled;
  static constexpr bool of_four_bits = S::key_bits == 4;
  using Registers = u32[in_registers ? S::key_steps : 1][S::row_tiles][4];

  FP_DEVICE static u32 lane_address(u32 query, int lane) {
    if constexpr (paired) {
      return PairedQuery<Traits>::lane_address(query, lane);
    } else if constexpr (of_four_bits) {
      return query;
    } else {
      return query_lane_address<Traits>(query, lane);
    }
  }

  // Loads the fragments that stay in registers; called before the first step.
  FP_DEVICE static void keep(Registers& registers, u32 at, int lane) {
    if constexpr (of_four_bits) {
      static_assert(in_registers);
#pragma unroll
      for (int i = 0; i < S::key_steps; i += 2)
        FourBitQuery<Traits>::load(registers[i], registers[i + 1], at, lane, i / 2);
    } else if constexpr (in_registers) {
#pragma unroll
      for (int i = 0; i < S::key_steps; ++i) load(registers[i], at, lane, i);
    }
  }

  FP_DEVICE static void take(u32 (&a)[S::row_tiles][4], const Registers& registers, u32 at, int lane, int step) {
    if constexpr (in_registers) {
#pragma unroll
      for (int m = 0; m < S::row_tiles; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) a[m][i] = registers[step][m][i];
    } else {
      load(a, ptx::opaque(at), lane, step);
    }
  }

 private:
  FP_DEVICE static void load(u32 (&a)[S::row_tiles][4], u32 from, int lane, int step) {
    if constexpr (paired) {
      PairedQuery<Traits>::load(a, from, lane, step);
    } else {
      load_query_fragment<Traits>(a, from, step);
    }
  }
};

}  // namespace flashpage
