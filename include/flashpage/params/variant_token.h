// A token of a tile, on the card: the tile's number plus a number known when the kernel is compiled.
#pragma once
#include "flashpage/common/types.h"

namespace flashpage::vm {

// With one rounding; on the host, where the compiler may take two, no result rests on it.
FP_HOST_DEVICE float multiply_add(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return a * b + c;
#endif
}

template <class T, class Other>
concept Exactly = is_same<T, Other>;

// base + slope * step: what a row has once, and a number of the tile's place. So a bias that is a row's number times a
// distance costs one instruction a score, and no conversion.
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

// An integer, but for what is added to it: that goes to the part which all of a lane's tokens share.
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

// Exact up to 2^24, as the conversion is.
FP_HOST_DEVICE Line to_float(Token token) {
  return {static_cast<float>(token.shared), 1.f, static_cast<float>(token.place)};
}

}  // namespace flashpage::vm
