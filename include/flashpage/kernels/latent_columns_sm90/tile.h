// A CTA's columns of 64 rows (tokens of a block, or rows of Q) in the shared memory of latent_columns_sm90.
#pragma once
#include "flashpage/common/math.h"
#include "flashpage/ptx/cluster.h"
#include "flashpage/tile/layout/swizzled_rows.h"

namespace flashpage {

// The columns that two warps convert: the first and the second half of the CTA's value columns, and its half of the
// tail.
enum class ColumnsPart { first, second, tail };
inline constexpr int columns_parts = 3;

// Panels of 64 value columns, as the copy engine writes them with its 128-byte swizzle, and then the tail: 32 columns
// with the 64-byte swizzle.
template <class Traits>
struct ColumnsTile {
  using Cache = typename Traits::Cache;
  static constexpr int rows = 64;  // tokens of a block, and packed rows of a warpgroup: Q and K have one tile type
  static constexpr int value_columns = Traits::head_dim_vo / 2;
  static constexpr int tail_columns = (Traits::head_dim_qk - Traits::head_dim_vo) / 2;
  using Values = SwizzledRows<Cache, value_columns, rows>;
  static constexpr int panel_columns = Values::panel_columns, panel_bytes = Values::panel_bytes;
  static constexpr int panels = Values::panels, part_panels = panels / 2;
  static constexpr int tail_stride = 64, tail = Values::tile_bytes;  // bytes; where the tail begins
  static constexpr int bytes = tail + (tail_columns > 0 ? rows * tail_stride : 0);
  static constexpr int loaded_parts = tail_columns > 0 ? columns_parts : columns_parts - 1;
  static constexpr int value_chunks = value_columns / 8, tail_chunks = tail_columns / 8;
  static_assert(sizeof(Cache) == 2, "factors of the products have 16 bits");
  static_assert(panels % 2 == 0 && value_columns % panel_columns == 0,
                "a CTA has two equal parts of whole panels of 64 columns");
  static_assert(tail_columns == 0 || tail_columns == 32, "half of a tail of 64 columns, or none");

  // The first column of a part that this CTA has: of a row's value columns, or of its tail.
  template <bool is_tail>
  FP_DEVICE static int first_column(ColumnsPart part) {
    const int rank = static_cast<int>(ptx::cluster_rank());
    if (is_tail) return rank * tail_columns;
    return rank * value_columns + (part == ColumnsPart::second ? part_panels * panel_columns : 0);
  }
  FP_DEVICE static u32 chunk_offset(u32 row, u32 chunk) { return Values::chunk_offset(row, chunk); }
  FP_DEVICE static u32 tail_offset(u32 row, u32 chunk) {
    return tail + row * tail_stride + ((chunk ^ row / 2) & 3) * 16;
  }
};

}  // namespace flashpage
