// The packed rows of a warp's m16 tiles. A lane holds rows lane / 4 and lane / 4 + 8 of each (halves 0 and 1).
#pragma once
#include "flashpage/ptx/compiler.h"
#include "flashpage/ptx/shared.h"
#include "flashpage/tile/unit.h"

namespace flashpage {

struct WarpRows {
  const AttentionParams& params;
  const WorkItem& item;
  const Unit& unit;
  int first_row;  // of the warp, in the unit
  int lane;

  FP_DEVICE int number(int m, int half) const { return first_row + m * 16 + half * 8 + lane / 4; }  // in the unit
  FP_DEVICE bool exists(int m, int half) const { return number(m, half) < unit.num_rows; }
  // A packed row of the lane; the unit's last row if that row does not exist.
  FP_DEVICE i32 packed_row(int m, int half) const { return clamped(number(m, half)); }
  FP_DEVICE PackedRow row(int m, int half) const { return unpack_row(params, unit.kv_head, packed_row(m, half)); }
  FP_DEVICE TokenRange visible(const PackedRow& row) const {
    return visible_range(params, item, query_position(item, row.row));
  }

  // A copy of this from which the compiler keeps nothing in registers from tile to tile.
  FP_DEVICE WarpRows recomputed() const {
    return {params, item, unit, static_cast<int>(ptx::opaque(first_row)), static_cast<int>(ptx::opaque(lane))};
  }

  // The packed row with number `row` in the unit; the unit's last row if that row does not exist.
  FP_DEVICE i32 clamped(int row) const { return unit.first_row + min_of(row, unit.num_rows - 1); }
};

}  // namespace flashpage
