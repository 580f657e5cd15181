// Online softmax that computes maxima only if a row's sum shows that its origin has to move.
#pragma once
#include "flashpage/ptx/convert.h"
#include "flashpage/tile/product/values.h"
#include "flashpage/tile/softmax/softmax.h"

namespace flashpage {

// Probabilities are relative to an origin, the maximum of an earlier tile, and may be larger than one, which costs fp32
// sums and 16-bit factors no precision. No probability is larger than the sum of its tile, which is needed anyway. So
// only if this sum exceeds a limit are maxima computed, and the tile's probabilities computed again. If scores have
// fewer tokens than probabilities have room for, the remaining ones stay as they are.
template <class Traits>
struct SoftmaxBySum {
  static constexpr float sum_limit = 1024.f;  // of a lane's share of a row in one tile; far below fp16's range

  // The first tile of a unit, whose rows have no origin yet.
  template <int token_tiles, class Probabilities>
  FP_DEVICE static void begin(SoftmaxState<1>& state, const float (&scores)[1][token_tiles][4],
                              Probabilities& probabilities, HalfScales scale) {
    float factor[1][2], sums[2];
    state.move(scores, scale, factor);
    exponentiate(state, scores, probabilities, scale, sums);
#pragma unroll
    for (int half = 0; half < 2; ++half) state.sum[0][half] += sums[half];
  }

  // Another tile. Returns whether values must be rescaled by `factor`.
  template <int token_tiles, class Probabilities>
  FP_DEVICE static bool run(SoftmaxState<1>& state, const float (&scores)[1][token_tiles][4],
                            Probabilities& probabilities, HalfScales scale, float (&factor)[1][2]) {
    float sums[2];
    exponentiate(state, scores, probabilities, scale, sums);
    // A NaN does not vote: it may be that of an absent row, on which the bits of others must not depend.
    const bool moves = __any_sync(0xffffffff, sums[0] > sum_limit || sums[1] > sum_limit);
    if (moves) {
      state.move(scores, scale, factor);
      exponentiate(state, scores, probabilities, scale, sums);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) state.sum[0][half] += sums[half];
    return moves;
  }

 private:
  template <int token_tiles, class Probabilities>
  FP_DEVICE static void exponentiate(const SoftmaxState<1>& state, const float (&scores)[1][token_tiles][4],
                                     Probabilities& probabilities, HalfScales scale, float (&sums)[2]) {
    // The origin of a row that has seen nothing: any visible score exceeds it, and hidden scores still give zero.
    constexpr float unset = -1e30f;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float maximum = state.maximum[0][half];
      const float origin = maximum == ptx::negative_infinity() ? unset : maximum;
      sums[half] = 0.f;
#pragma unroll
      for (int n = 0; n < token_tiles; ++n) {
        const float a = ptx::exp2_approx(fmaf(scores[0][n][half * 2], scale.of_half[half], -origin));
        const float b = ptx::exp2_approx(fmaf(scores[0][n][half * 2 + 1], scale.of_half[half], -origin));
        probabilities.fragment[n / 2][0][n % 2 * 2 + half] = ptx::pack2<typename Shape<Traits>::Probability>(a, b);
        sums[half] += a + b;
      }
    }
  }
};

}  // namespace flashpage
