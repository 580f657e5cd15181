// The softmax of a tile whose probabilities become fp8 factors of the value product.
#pragma once
#include "flashpage/ptx/convert.h"
#include "flashpage/tile/softmax/softmax.h"

namespace flashpage {

// Probabilities relative to the state's maximum are multiplied by 2^7; since fp8's largest number is 448, a score may
// exceed the maximum by 2^1.8. They keep three mantissa bits down to 2^-13 of the maximum, and are zero below 2^-17.
// Sums have the factor of 2^7 too.
template <int row_tiles>
struct Fp8Softmax : SoftmaxState<row_tiles> {
  using Base = SoftmaxState<row_tiles>;
  static constexpr int lift = 7;
  static constexpr float headroom = 1.8f;

  // Lifts the sums of sinks with which the state has begun.
  FP_DEVICE void lift_sums() {
#pragma unroll
    for (int i = 0; i < 2 * row_tiles; ++i) this->sum[i / 2][i % 2] *= 1 << lift;
  }
  // Lowers the maxima, so that from here on the state gives a correct LSE.
  FP_DEVICE void lower_maxima() {
#pragma unroll
    for (int i = 0; i < 2 * row_tiles; ++i) this->maximum[i / 2][i % 2] -= lift;
  }

  // Whether the maximum of a row of the warp moved: values are then rescaled by `factor`.
  template <int token_tiles>
  FP_DEVICE bool raise(const float (&scores)[row_tiles][token_tiles][4], auto scale, float (&factor)[row_tiles][2]) {
    return Base::raise(scores, scale, factor, headroom);
  }
  // As SoftmaxState::update.
  template <int token_tiles, int value_tiles>
  FP_DEVICE void update(float (&scores)[row_tiles][token_tiles][4], float (&values)[row_tiles][value_tiles][4],
                        auto scale) {
    float factor[row_tiles][2];
    if (raise(scores, scale, factor)) this->rescale(values, factor);
    this->exponentiate(scores, scale, lift);
  }
};

// The softmax of one m16 tile of rows in parts, for a kernel that has other work in between.
struct Fp8SoftmaxInParts : Fp8Softmax<1> {
  // Computes and packs probabilities. A register has four: two of this lane's tokens in one n8 tile and two in the next
  // (tile/load/transposed_values.h). Of the last `later` steps it computes only the exponents, so that their scores'
  // registers are free.
  template <class Fp8, int later, int steps>
  FP_DEVICE void soften(u32 (&probabilities)[steps][4], float (&exponents)[max_of(later, 1) * 4][4],
                        const float (&scores)[1][steps * 4][4], HalfScales scale) {
    constexpr int now = steps - later;
    const float origin[2] = {finite_or_zero(maximum[0][0]) - lift, finite_or_zero(maximum[0][1]) - lift};
#pragma unroll
    for (int n = now * 4; n < steps * 4; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        exponents[n - now * 4][e] = fmaf(scores[0][n][e], scale.of_half[e / 2], -origin[e / 2]);
    pack<Fp8, 0, now>(probabilities,
                      [&](int n, int e) { return fmaf(scores[0][n][e], scale.of_half[e / 2], -origin[e / 2]); });
  }
  // Computes and packs the probabilities of the last `later` steps.
  template <class Fp8, int later, int steps>
  FP_DEVICE void soften_later(u32 (&probabilities)[steps][4], const float (&exponents)[max_of(later, 1) * 4][4]) {
    constexpr int now = steps - later;
    pack<Fp8, now, steps>(probabilities, [&](int n, int e) { return exponents[n - now * 4][e]; });
  }

 private:
  template <class Fp8, int begin, int end, int steps, class Exponent>
  FP_DEVICE void pack(u32 (&probabilities)[steps][4], Exponent&& exponent) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int pair = begin * 2; pair < end * 2; ++pair) {
        float p[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) p[i] = ptx::exp2_approx(exponent(pair * 2 + i / 2, half * 2 + i % 2));
        probabilities[pair / 2][pair % 2 * 2 + half] = ptx::pack4<Fp8>(p[0], p[1], p[2], p[3]);
        sum[0][half] += (p[0] + p[1]) + (p[2] + p[3]);
      }
  }
};

}  // namespace flashpage
