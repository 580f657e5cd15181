// Online softmax in base 2 over the rows of one warp. A lane holds rows lane / 4 and lane / 4 + 8 of each m16 tile; the four
// lanes of a quad share a row. Running sums stay per lane until the end.
#pragma once
#include "flashpage/ptx/math.h"
#include "flashpage/tile/shape.h"

namespace flashpage {

FP_DEVICE float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}
FP_DEVICE float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffff, x, 1);
  return x + __shfl_xor_sync(0xffffffff, x, 2);
}

template <int row_tiles>
struct SoftmaxState {
  float maximum[row_tiles][2];  // of the scaled scores, base 2
  float sum[row_tiles][2];      // this lane's part

  FP_DEVICE void clear() {
#pragma unroll
    for (int m = 0; m < row_tiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        maximum[m][half] = ptx::negative_infinity();
        sum[m][half] = 0.f;
      }
  }

  // Scores become probabilities, relative to the new maximum; `values` is rescaled to it. `scale` turns raw scores to base 2.
  template <int token_tiles, int value_tiles>
  FP_DEVICE void update(float (&scores)[row_tiles][token_tiles][4], float (&values)[row_tiles][value_tiles][4],
                        float scale) {
#pragma unroll
    for (int m = 0; m < row_tiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int e = half * 2;
        float top = fmaxf(scores[m][0][e], scores[m][0][e + 1]);
#pragma unroll
        for (int n = 1; n < token_tiles; ++n) top = fmaxf(top, fmaxf(scores[m][n][e], scores[m][n][e + 1]));
        float next = fmaxf(maximum[m][half], quad_max(top) * scale);
        // A row that has seen nothing yet: exp2(-inf - 0) is 0, where -inf - -inf would be NaN.
        float origin = next == ptx::negative_infinity() ? 0.f : next;
        float rescale = ptx::exp2_approx(maximum[m][half] - origin);
        maximum[m][half] = next;
        float total = sum[m][half] * rescale;
#pragma unroll
        for (int n = 0; n < token_tiles; ++n) {
          scores[m][n][e] = ptx::exp2_approx(fmaf(scores[m][n][e], scale, -origin));
          scores[m][n][e + 1] = ptx::exp2_approx(fmaf(scores[m][n][e + 1], scale, -origin));
          total += scores[m][n][e] + scores[m][n][e + 1];
        }
        sum[m][half] = total;
#pragma unroll
        for (int n = 0; n < value_tiles; ++n) {
          values[m][n][e] *= rescale;
          values[m][n][e + 1] *= rescale;
        }
      }
  }
};

// Base-2 log-sum-exp of a row; -inf where nothing was visible.
FP_DEVICE float row_lse(float maximum, float sum) {
  return sum > 0.f ? maximum + log2f(sum) : ptx::negative_infinity();
}

}  // namespace flashpage
