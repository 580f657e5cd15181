// Soft caps: cap * tanh(score / cap). The tanh of a score that is smaller than the cap is a polynomial; others need two
// special functions, which are left out if a warp's tile has no such score. A score's bits do not depend on other
// scores: those of hidden tokens may be anything, such as what a slot held before. Where arithmetic limits a kernel and
// weights are bf16 or e4m3, tanh is the card's approximation, whose error is up to 2^-11 of a score. That changes the
// weight of a score up to 4 by less than bf16 rounds it, and that of a score of 50 by up to 2.5%; outputs on a card
// were as exact as before (docs/numerics.md).
#pragma once
#include "flashpage/params/variant.h"
#include "flashpage/ptx/math.h"
#include "flashpage/ptx/rcp.h"

namespace flashpage {

// The argument of a score is argument_scale * score. Its tanh replaces it, and softmax_scale converts that to base 2.
template <bool approximate>
struct SoftCap {
  float cap, argument_scale;

  FP_DEVICE explicit SoftCap(float cap)
      : cap(cap < 0.f ? -cap : cap), argument_scale((approximate ? 1.f : 2.f) * ptx::reciprocal_approx(this->cap)) {}
  FP_DEVICE float softmax_scale() const { return cap * log2_e; }

  // By the card's tanh.
  FP_DEVICE static float of_argument(float argument)
    requires approximate
  {
    return ptx::tanh_approx(argument);
  }
  template <int token_tiles>
  FP_DEVICE static void apply(float (&arguments)[token_tiles][4]) {
    if constexpr (approximate) {
      for_each(arguments, [](float& y) { y = of_argument(y); });
    } else if (are_small(arguments)) {
      for_each(arguments, [](float& y) { y = polynomial(y); });
    } else {
      for_each(arguments, [](float& y) { y = is_large(__float_as_uint(y)) ? exact(y * log2_e) : polynomial(y); });
    }
  }

 private:
  // Of an argument's bits, or those of several together: a number from 2 on, infinity and NaN have bit 30.
  FP_DEVICE static bool is_large(u32 bits) { return (bits & 0x40000000) != 0; }
  // Whether the polynomial serves all of a warp's arguments.
  template <int token_tiles>
  FP_DEVICE static bool are_small(const float (&arguments)[token_tiles][4]) {
    auto bits = __float_as_uint(arguments[0][0]);
#pragma unroll
    for (int n = 0; n < token_tiles; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) bits |= __float_as_uint(arguments[n][e]);
    return !__any_sync(0xffffffff, is_large(bits));
  }
  // tanh(y / 2) for |y| < 2: relative error 2^-20.5 (a minimax fit).
  FP_DEVICE static float polynomial(float y) {
    const float u = y * y;
    const float high = vm::multiply_add(vm::multiply_add(-1.49758512e-6f, u, 3.27013659e-5f), u, -4.03169222e-4f);
    return y * vm::multiply_add(vm::multiply_add(vm::multiply_add(high, u, 4.15044790e-3f), u, -4.16613035e-2f), u,
                                0.499999702f);
  }
  // 1 - 2 / (1 + 2^y).
  FP_DEVICE static float exact(float y) {
    return vm::multiply_add(-2.f, ptx::reciprocal_approx(1.f + ptx::exp2_approx(y)), 1.f);
  }
  template <int token_tiles>
  FP_DEVICE static void for_each(float (&arguments)[token_tiles][4], auto&& function) {
#pragma unroll
    for (int n = 0; n < token_tiles; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) function(arguments[n][e]);
  }
};

}  // namespace flashpage
