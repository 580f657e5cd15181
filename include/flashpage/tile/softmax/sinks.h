// Attention sinks: a row's softmax state begins with its head's sink, a logit that has no value.
#pragma once
#include "flashpage/ptx/math.h"
#include "flashpage/tile/softmax/softmax.h"
#include "flashpage/tile/unit.h"

namespace flashpage {

// In base 2, or -inf: only the first piece of a unit takes it.
FP_DEVICE float sink_of_row(const AttentionParams& params, const WorkItem& item, const Unit& unit, i32 packed_row) {
  if (!params.sinks || item.piece != 0) return ptx::negative_infinity();
  return params.sinks[unpack_row(params, unit.kv_head, packed_row).head] * log2_e;
}

// The state of a warp's rows from `first_row` of the unit on, where params.sinks is given; one warp of those that share
// the rows begins with it.
template <int row_tiles>
FP_DEVICE void begin_with_sinks(SoftmaxState<row_tiles>& state, const AttentionParams& params, const WorkItem& item,
                                const Unit& unit, int first_row, int lane) {
#pragma unroll
  for (int m = 0; m < row_tiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      i32 row = min_of(first_row + m * 16 + half * 8 + lane / 4, unit.num_rows - 1);
      state.maximum[m][half] = sink_of_row(params, item, unit, unit.first_row + row);
      state.sum[m][half] = lane % 4 == 0 && state.maximum[m][half] != ptx::negative_infinity() ? 1.f : 0.f;
    }
}

}  // namespace flashpage
