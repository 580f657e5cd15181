// exp2, log2, sine and cosine of the host; the latter two are as inexact as on the card.
#pragma once
#include "hopper.h"

namespace flashpage::ptx {

inline float exp2_approx(float x) { return std::exp2(x); }
inline float tanh_approx(float x) { return std::tanh(x); }
inline float log2_approx(float x) { return std::log2(x); }
// Rounds to the nearest multiple of 2^-21.
inline float coarse(float x) { return std::rint(x * 0x1p21f) * 0x1p-21f; }
inline float sin_approx(float x) { return coarse(std::sin(x)); }
inline float cos_approx(float x) { return coarse(std::cos(x)); }
inline float negative_infinity() { return -INFINITY; }

}  // namespace flashpage::ptx
