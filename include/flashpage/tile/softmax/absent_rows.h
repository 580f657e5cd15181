// Rows of a tile that its unit does not have.
#pragma once
#include "flashpage/ptx/math.h"
#include "flashpage/tile/softmax/softmax.h"
#include "flashpage/tile/warp_rows.h"

namespace flashpage {

// Boxes bring queries of the next request for these rows. If their scores moved the maxima of the warp, the bits of the
// unit's own rows would depend on the batch. A maximum that begins at infinity never moves.
template <int row_tiles>
FP_DEVICE void ignore_absent_rows(SoftmaxState<row_tiles>& state, const WarpRows& rows) {
#pragma unroll
  for (int m = 0; m < row_tiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (!rows.exists(m, half)) state.maximum[m][half] = -ptx::negative_infinity();
}

}  // namespace flashpage
