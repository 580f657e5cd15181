// Online softmax in base 2 over the rows of one warp. A lane holds rows lane / 4 and lane / 4 + 8 of each m16 tile; the
// four lanes of a quad share a row. Running sums stay per lane until the end.
#pragma once
#include "flashpage/tile/layout/shape.h"
#include "flashpage/tile/softmax/half_scales.h"
#include "flashpage/tile/softmax/state_weight.h"

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
  float maximum[row_tiles][2];  // base 2, of the scaled scores
  float sum[row_tiles][2];      // of this lane's scores

  FP_DEVICE void clear() {
#pragma unroll
    for (int m = 0; m < row_tiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        maximum[m][half] = ptx::negative_infinity();
        sum[m][half] = 0.f;
      }
  }

  // Turns scores to probabilities relative to the maximum. `scale` converts raw scores to base 2.
  template <int token_tiles, int value_tiles>
  FP_DEVICE void update(float (&scores)[row_tiles][token_tiles][4], float (&values)[row_tiles][value_tiles][4],
                        auto scale) {
    float factor[row_tiles][2];
    if (raise(scores, scale, factor)) rescale(values, factor);
    exponentiate(scores, scale);
  }

  // The first part of update, for kernels that have other work in between. The maximum moves, and values are rescaled
  // by `factor` (returns true), only if a row of the warp exceeded it by 2^headroom. After the first tiles that is
  // rare, and 256 times larger probabilities cost fp32 sums and 16-bit factors no precision.
  template <int token_tiles>
  FP_DEVICE bool raise(const float (&scores)[row_tiles][token_tiles][4], auto scale, float (&factor)[row_tiles][2],
                       float headroom = 8.f) {
    float top[row_tiles][2];
    const bool outgrown = outgrows(scores, scale, headroom, top);
    if (!__any_sync(0xffffffff, outgrown)) return false;
    move_to(top, scale, factor);
    return true;
  }

  // Whether a score of this lane exceeds its row's maximum by 2^headroom: no exchange is needed to find that nothing
  // moves. `top`: maxima of this lane's scores.
  template <int token_tiles>
  FP_DEVICE bool outgrows(const float (&scores)[row_tiles][token_tiles][4], auto scale, float headroom,
                          float (&top)[row_tiles][2]) const {
    bool outgrown = false;
#pragma unroll
    for (int m = 0; m < row_tiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        top[m][half] = lane_maximum(scores[m], half);
        outgrown = outgrown || top[m][half] * scale_of(scale, half) > maximum[m][half] + headroom;
      }
    return outgrown;
  }

  // As raise, but the maximum always moves.
  template <int token_tiles>
  FP_DEVICE void move(const float (&scores)[row_tiles][token_tiles][4], auto scale, float (&factor)[row_tiles][2]) {
    float top[row_tiles][2];
#pragma unroll
    for (int m = 0; m < row_tiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) top[m][half] = lane_maximum(scores[m], half);
    move_to(top, scale, factor);
  }

  template <int value_tiles>
  FP_DEVICE static void rescale(float (&values)[row_tiles][value_tiles][4], const float (&factor)[row_tiles][2]) {
#pragma unroll
    for (int m = 0; m < row_tiles; ++m)
#pragma unroll
      for (int n = 0; n < value_tiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) values[m][n][e] *= factor[m][e / 2];
  }

  // The second part of update, from token tile `first` on. Probabilities are multiplied by 2^lift.
  template <int first = 0, int token_tiles>
  FP_DEVICE void exponentiate(float (&scores)[row_tiles][token_tiles][4], auto scale, float lift = 0.f) {
#pragma unroll
    for (int m = 0; m < row_tiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int e = half * 2;
        float origin = finite_or_zero(maximum[m][half]) - lift;
        float total = sum[m][half];
#pragma unroll
        for (int n = first; n < token_tiles; ++n) {
          scores[m][n][e] = ptx::exp2_approx(fmaf(scores[m][n][e], scale_of(scale, half), -origin));
          scores[m][n][e + 1] = ptx::exp2_approx(fmaf(scores[m][n][e + 1], scale_of(scale, half), -origin));
          total += scores[m][n][e] + scores[m][n][e + 1];
        }
        sum[m][half] = total;
      }
  }

  // The maximum of this lane's scores in a row.
  template <int token_tiles>
  FP_DEVICE static float lane_maximum(const float (&scores)[token_tiles][4], int half) {
    constexpr int chains = token_tiles >= 8 ? 4 : 2;  // independent chains: a single one would wait for itself
    const int e = half * 2;
    float tops[chains];
#pragma unroll
    for (int i = 0; i < chains; ++i) tops[i] = scores[i / 2][e + i % 2];
#pragma unroll
    for (int i = chains; i < 2 * token_tiles; ++i) tops[i % chains] = fmaxf(tops[i % chains], scores[i / 2][e + i % 2]);
    return chains == 2 ? fmaxf(tops[0], tops[1])
                       : fmaxf(fmaxf(tops[0], tops[1]), fmaxf(tops[chains - 2], tops[chains - 1]));
  }

  // `top`: maxima of this lane's scores.
  FP_DEVICE void move_to(const float (&top)[row_tiles][2], auto scale, float (&factor)[row_tiles][2]) {
#pragma unroll
    for (int m = 0; m < row_tiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float next = fmaxf(maximum[m][half], quad_max(top[m][half]) * scale_of(scale, half));
        factor[m][half] = state_weight(maximum[m][half], next);
        maximum[m][half] = next;
        sum[m][half] *= factor[m][half];
      }
  }
};

// Base-2 log-sum-exp of a row: -inf if no token was visible, NaN if a score was NaN.
FP_DEVICE float row_lse(float maximum, float sum) {
  return sum == 0.f ? ptx::negative_infinity() : maximum + log2f(sum);
}

}  // namespace flashpage
