// A token of a tile, on the card: a number that the lane computes for each tile, plus one that is known when the kernel
// is compiled.
#pragma once
#include "flashpage/common/types.h"

namespace flashpage::vm {

// One rounding on the card. Host compilers may round twice; no result depends on it there.
FP_HOST_DEVICE float multiply_add(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return a * b + c;
#endif
}

template <class T, class Other>
concept Exactly = is_same<T, Other>;

// base + slope * step: base and slope are computed once a row, step belongs to the place in the tile. A bias that is a
// row's number times a distance thus costs one instruction a score and no conversion.
struct Line {
  float base, slope, step;

  FP_HOST_DEVICE operator float() const { return multiply_add(slope, step, base); }
  template <Exactly<float> X>
  friend FP_HOST_DEVICE Line operator*(Line line, X factor) {
    return {line.base * factor, line.slope * factor, line.step};
  }
  template <Exactly<float> X>
  friend FP_HOST_DEVICE Line operator*(X factor, Line line) {
    return line * factor;
  }
};

// An integer to which integers may be added; they go into `shared`, which is the same for all tokens of a lane.
struct Token {
  i32 shared, place;

  FP_HOST_DEVICE operator i32() const { return shared + place; }
  template <Exactly<i32> X>
  friend FP_HOST_DEVICE Token operator+(Token token, X x) {
    return {token.shared + x, token.place};
  }
  template <Exactly<i32> X>
  friend FP_HOST_DEVICE Token operator+(X x, Token token) {
    return token + x;
  }
  template <Exactly<i32> X>
  friend FP_HOST_DEVICE Token operator-(Token token, X x) {
    return {token.shared - x, token.place};
  }
  template <Exactly<i32> X>
  friend FP_HOST_DEVICE Token operator-(X x, Token token) {
    return {x - token.shared, -token.place};
  }
};

// Exact up to 2^24, like the conversion from i32 to float.
FP_HOST_DEVICE Line to_float(Token token) {
  return {static_cast<float>(token.shared), 1.f, static_cast<float>(token.place)};
}

}  // namespace flashpage::vm
