// The softmax of a tile whose products take less time than its exponentials: some probabilities are computed while the
// maximum is looked for, as it rarely moves.
#pragma once
#include "flashpage/ptx/convert.h"
#include "flashpage/tile/softmax.h"

namespace flashpage {

// SoftmaxState::raise and exponentiate of one m16 tile of rows. `packed`: probabilities of the first `early` token
// tiles; the others take the place of their scores.
template <class Probability, int early, int token_tiles>
FP_DEVICE bool soften_ahead(SoftmaxState<1>& state, float (&scores)[1][token_tiles][4], u32 (&packed)[early][2],
                            float scale, float (&factor)[1][2]) {
  float sums[2];
  auto soften_early = [&] {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float origin = state.finite_or_zero(state.maximum[0][half]);
      sums[half] = 0.f;
#pragma unroll
      for (int n = 0; n < early; ++n) {
        const float a = ptx::exp2_approx(fmaf(scores[0][n][half * 2], scale, -origin));
        const float b = ptx::exp2_approx(fmaf(scores[0][n][half * 2 + 1], scale, -origin));
        packed[n][half] = ptx::pack2<Probability>(a, b);
        sums[half] += a + b;
      }
    }
  };
  soften_early();
  const bool outgrown = state.raise(scores, scale, factor);
  if (outgrown) soften_early();
#pragma unroll
  for (int half = 0; half < 2; ++half) state.sum[0][half] += sums[half];
  state.template exponentiate<early>(scores, scale);
  return outgrown;
}

}  // namespace flashpage
