// Attention sinks: a row's softmax state begins with its head's sink, a logit that has no value.
#pragma once
#include "flashpage/ptx/math.h"
#include "flashpage/tile/softmax/softmax.h"
#include "flashpage/tile/warp_rows.h"

namespace flashpage {

// The sink of a row in base 2, or -inf: only the first piece of a unit has it.
FP_DEVICE float sink_of(const WarpRows& rows, i32 packed_row) {
  if (!rows.params.sinks || rows.item.piece != 0) return ptx::negative_infinity();
  return rows.params.sinks[unpack_row(rows.params, rows.unit.kv_head, packed_row).head] * log2_e;
}

// Begins the state of a warp's rows with their sinks. Called if params.sinks is given; if several warps share the rows,
// one of them calls it.
template <int row_tiles>
FP_DEVICE void begin_with_sinks(SoftmaxState<row_tiles>& state, const WarpRows& rows) {
#pragma unroll
  for (int m = 0; m < row_tiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      state.maximum[m][half] = sink_of(rows, rows.packed_row(m, half));
      state.sum[m][half] = rows.lane % 4 == 0 && state.maximum[m][half] != ptx::negative_infinity() ? 1.f : 0.f;
    }
}

}  // namespace flashpage
