// The softmax of a tile whose probabilities are fp8 factors of the next product.
#pragma once
#include "flashpage/ptx/convert.h"
#include "flashpage/tile/softmax.h"

namespace flashpage {

// Of one m16 tile of rows. fp8's largest number is 448: probabilities lie at 2^7 of what they are relative to the
// maximum that the state has, which a score may outgrow by 2^1.8. They keep their three bits down to 2^-13 of it, and
// are zero from 2^-17 on. Sums lie as high as probabilities do.
struct Fp8Softmax : SoftmaxState<1> {
  static constexpr int lift = 7;
  static constexpr float headroom = 1.8f;

  // Of sinks that the state has begun with.
  FP_DEVICE void lift_sums() {
    sum[0][0] *= 1 << lift;
    sum[0][1] *= 1 << lift;
  }
  // What an LSE is made of, from there on.
  FP_DEVICE void lower_maxima() {
    maximum[0][0] -= lift;
    maximum[0][1] -= lift;
  }

  // Packs probabilities of a row's first tile. A register has four of them: two of this lane's tokens in one n8 tile
  // and two in the next (tile/transposed_values.h).
  template <class Fp8, int steps>
  FP_DEVICE void soften_first(u32 (&packed)[steps][4], const float (&scores)[1][steps * 4][4], float scale) {
    float factor[1][2], sums[2] = {0.f, 0.f};
    raise(scores, scale, factor, headroom);
    exponentiate<Fp8, 0, steps>(packed, sums, scores[0], scale);
    add(sums);
  }
  // Of a later tile. Those of the first `early` registers' tokens are computed while the maxima are looked for, as
  // exponentials take longest and maxima rarely move. True: values are to be rescaled by `factor`.
  template <class Fp8, int early, int steps>
  FP_DEVICE bool soften(u32 (&packed)[steps][4], const float (&scores)[1][steps * 4][4], float scale,
                        float (&factor)[1][2]) {
    float sums[2] = {0.f, 0.f};
    exponentiate<Fp8, 0, early>(packed, sums, scores[0], scale);
    const bool outgrown = raise(scores, scale, factor, headroom);
    if (early > 0 && outgrown) {
      sums[0] = sums[1] = 0.f;
      exponentiate<Fp8, 0, early>(packed, sums, scores[0], scale);
    }
    exponentiate<Fp8, early, steps>(packed, sums, scores[0], scale);
    add(sums);
    return outgrown;
  }

 private:
  template <class Fp8, int begin, int end, int steps>
  FP_DEVICE void exponentiate(u32 (&packed)[steps][4], float (&sums)[2], const float (&scores)[steps * 4][4],
                              float scale) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float origin = finite_or_zero(maximum[0][half]) - lift;
      const auto probability = [&](int n, int e) {
        return ptx::exp2_approx(fmaf(scores[n][half * 2 + e], scale, -origin));
      };
#pragma unroll
      for (int pair = begin * 2; pair < end * 2; ++pair) {
        const float a = probability(pair * 2, 0), b = probability(pair * 2, 1);
        const float c = probability(pair * 2 + 1, 0), d = probability(pair * 2 + 1, 1);
        packed[pair / 2][pair % 2 * 2 + half] = ptx::pack4<Fp8>(a, b, c, d);
        sums[half] += (a + b) + (c + d);
      }
    }
  }
  FP_DEVICE void add(const float (&sums)[2]) {
    sum[0][0] += sums[0];
    sum[0][1] += sums[1];
  }
};

}  // namespace flashpage
