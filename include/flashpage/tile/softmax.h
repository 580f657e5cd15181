// Online softmax in base 2 over the rows of one warp. A lane holds rows lane / 4 and lane / 4 + 8 of each m16 tile; the
// four lanes of a quad share a row. Running sums stay per lane until the end.
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

  // Scores become probabilities, relative to the maximum. `scale` turns raw scores to base 2.
  //
  // The maximum moves, and `values` are rescaled to it, only when some row of the warp outgrew it by 2^8: after the
  // first tiles that is rare, and 256 times larger probabilities cost fp32 sums and 16-bit factors no precision.
  template <int token_tiles, int value_tiles>
  FP_DEVICE void update(float (&scores)[row_tiles][token_tiles][4], float (&values)[row_tiles][value_tiles][4],
                        float scale) {
    constexpr float headroom = 8.f;
    float next[row_tiles][2];
    bool outgrown = false;
#pragma unroll
    for (int m = 0; m < row_tiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int e = half * 2;
        float top = fmaxf(scores[m][0][e], scores[m][0][e + 1]);
#pragma unroll
        for (int n = 1; n < token_tiles; ++n) top = fmaxf(top, fmaxf(scores[m][n][e], scores[m][n][e + 1]));
        next[m][half] = quad_max(top) * scale;
        outgrown = outgrown || next[m][half] > maximum[m][half] + headroom;
      }
    if (__any_sync(0xffffffff, outgrown)) rescale(next, values);
#pragma unroll
    for (int m = 0; m < row_tiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int e = half * 2;
        float origin = finite_or_zero(maximum[m][half]);
        float total = sum[m][half];
#pragma unroll
        for (int n = 0; n < token_tiles; ++n) {
          scores[m][n][e] = ptx::exp2_approx(fmaf(scores[m][n][e], scale, -origin));
          scores[m][n][e + 1] = ptx::exp2_approx(fmaf(scores[m][n][e + 1], scale, -origin));
          total += scores[m][n][e] + scores[m][n][e + 1];
        }
        sum[m][half] = total;
      }
  }

 private:
  // A row that has seen nothing yet: exp2(-inf - 0) is 0, where -inf - -inf would be NaN.
  FP_DEVICE static float finite_or_zero(float x) { return x == ptx::negative_infinity() ? 0.f : x; }

  template <int value_tiles>
  FP_DEVICE void rescale(const float (&next)[row_tiles][2], float (&values)[row_tiles][value_tiles][4]) {
#pragma unroll
    for (int m = 0; m < row_tiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float top = fmaxf(maximum[m][half], next[m][half]);
        float factor = ptx::exp2_approx(maximum[m][half] - finite_or_zero(top));
        maximum[m][half] = top;
        sum[m][half] *= factor;
#pragma unroll
        for (int n = 0; n < value_tiles; ++n) {
          values[m][n][half * 2] *= factor;
          values[m][n][half * 2 + 1] *= factor;
        }
      }
  }
};

// Base-2 log-sum-exp of a row; -inf where nothing was visible, NaN where a score was.
FP_DEVICE float row_lse(float maximum, float sum) {
  return sum == 0.f ? ptx::negative_infinity() : maximum + log2f(sum);
}

}  // namespace flashpage
