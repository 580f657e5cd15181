// Soft caps: cap * tanh(score / cap), computed with few special functions.
#pragma once
#include "flashpage/params/variant.h"
#include "flashpage/ptx/math.h"
#include "flashpage/ptx/rcp.h"

namespace flashpage {

// The forms under test; FP_SOFT_CAP_FORM chooses one.
enum class SoftCapForm {
  exact,       // cap - 2 cap / (1 + 2^x): two special functions
  polynomial,  // a polynomial where all scores of a warp's tile are small, else exact
  rational,    // a quotient of polynomials, one reciprocal for two scores
  hardware,    // tanh.approx: error 2^-11
  paired,      // as exact, one reciprocal for two scores
  quotient,    // as polynomial, else rational
};
#if !defined(FP_SOFT_CAP_FORM)
#define FP_SOFT_CAP_FORM 0
#endif

// cap * tanh(score / cap) for caps up to `most`; the variant's own function computes larger ones, because the error of
// the exact form is 2^-22 of the cap.
//
// The argument of a score is argument_scale * score. Its tanh, or for the exact form its capped score, replaces it, and
// softmax_scale converts that to base 2.
struct SoftCap {
  static constexpr SoftCapForm form = static_cast<SoftCapForm>(FP_SOFT_CAP_FORM);
  static constexpr bool by_tile = form != SoftCapForm::exact && form != SoftCapForm::hardware;
  static constexpr bool is_polynomial = form == SoftCapForm::polynomial || form == SoftCapForm::quotient;
  static constexpr float most = 128.f;
  float cap, argument_scale;

  FP_DEVICE explicit SoftCap(float cap)
      : cap(form != SoftCapForm::exact && cap < 0.f ? -cap : cap),
        argument_scale(argument_of_one() * ptx::reciprocal_approx(this->cap)) {}
  FP_DEVICE bool serves() const { return form == SoftCapForm::polynomial || (cap <= most && cap >= -most); }
  FP_DEVICE float softmax_scale() const { return form == SoftCapForm::exact ? log2_e : cap * log2_e; }

  // One score, without regard to others.
  FP_DEVICE float of_argument(float argument) const {
    if constexpr (form == SoftCapForm::exact)
      return vm::multiply_add(-2.f * cap, ptx::reciprocal_approx(1.f + ptx::exp2_approx(argument)), cap);
    if constexpr (form == SoftCapForm::hardware) return ptx::tanh_approx(argument);
    return exact(argument);
  }
  template <int token_tiles>
  FP_DEVICE static void apply(float (&arguments)[token_tiles][4]) {
    if constexpr (is_polynomial) {
      if (are_small(arguments)) {
        for_each(arguments, [](float& y) { y = polynomial(y); });
      } else {
        if constexpr (form == SoftCapForm::polynomial) for_each(arguments, [](float& y) { y = exact(y * log2_e); });
        if constexpr (form == SoftCapForm::quotient)
          for_pairs(arguments, [](float& a, float& b) { rational(a *= 0.5f, b *= 0.5f); });
      }
    }
    if constexpr (form == SoftCapForm::rational) for_pairs(arguments, rational);
    if constexpr (form == SoftCapForm::paired) for_pairs(arguments, paired);
  }

  // Whether the polynomial serves all of a warp's arguments: a number from 2 on, infinity and NaN have bit 30.
  template <int token_tiles>
  FP_DEVICE static bool are_small(const float (&arguments)[token_tiles][4]) {
    auto bits = __float_as_uint(arguments[0][0]);
#pragma unroll
    for (int n = 0; n < token_tiles; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) bits |= __float_as_uint(arguments[n][e]);
    return !__any_sync(0xffffffff, (bits & 0x40000000) != 0);
  }
  // tanh(y / 2) for |y| < 2: relative error 2^-20.5 (a minimax fit).
  FP_DEVICE static float polynomial(float y) {
    const float u = y * y;
    const float high = vm::multiply_add(vm::multiply_add(-1.49758512e-6f, u, 3.27013659e-5f), u, -4.03169222e-4f);
    return y * vm::multiply_add(vm::multiply_add(vm::multiply_add(high, u, 4.15044790e-3f), u, -4.16613035e-2f), u,
                                0.499999702f);
  }

 private:
  // 1 - 2 / (1 + 2^y).
  FP_DEVICE static float exact(float y) {
    return vm::multiply_add(-2.f, ptx::reciprocal_approx(1.f + ptx::exp2_approx(y)), 1.f);
  }
  // The argument of a score that equals the cap.
  FP_DEVICE static constexpr float argument_of_one() {
    if (form == SoftCapForm::exact || form == SoftCapForm::paired) return 2.f * log2_e;
    return is_polynomial ? 2.f : 1.f;
  }
  template <int token_tiles>
  FP_DEVICE static void for_each(float (&arguments)[token_tiles][4], auto&& function) {
#pragma unroll
    for (int n = 0; n < token_tiles; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) function(arguments[n][e]);
  }
  template <int token_tiles>
  FP_DEVICE static void for_pairs(float (&arguments)[token_tiles][4], auto&& function) {
#pragma unroll
    for (int n = 0; n < token_tiles; ++n)
#pragma unroll
      for (int e = 0; e < 4; e += 2) function(arguments[n][e], arguments[n][e + 1]);
  }
  // tanh(x) = x P(x^2) / Q(x^2) for |x| <= 5: relative error 2^-14.2; 2^-13.4 beyond.
  FP_DEVICE static void rational(float& a, float& b) {
    const float x[2] = {ptx::clamp_or_nan(a, 5.f), ptx::clamp_or_nan(b, 5.f)};
    float p[2], q[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float u = x[i] * x[i];
      p[i] = x[i] * vm::multiply_add(vm::multiply_add(0.000670564419f, u, 0.102417655f), u, 0.999948025f);
      q[i] = vm::multiply_add(vm::multiply_add(0.0128198760f, u, 0.435432434f), u, 1.f);
    }
    const float reciprocal = ptx::reciprocal_approx(q[0] * q[1]);
    a = p[0] * (q[1] * reciprocal);
    b = p[1] * (q[0] * reciprocal);
  }
  // 1 - 2 / (1 + 2^y). Arguments end at 60, where tanh is 1, so that the product of two denominators is finite.
  FP_DEVICE static void paired(float& a, float& b) {
    const float s = 1.f + ptx::exp2_approx(ptx::least_or_nan(a, 60.f)),
                t = 1.f + ptx::exp2_approx(ptx::least_or_nan(b, 60.f));
    const float reciprocal = -2.f * ptx::reciprocal_approx(s * t);
    a = vm::multiply_add(t, reciprocal, 1.f);
    b = vm::multiply_add(s, reciprocal, 1.f);
  }
};

}  // namespace flashpage
