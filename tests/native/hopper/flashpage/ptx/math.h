// exp2 and log2 of the host.
#pragma once
#include "hopper.h"

namespace flashpage::ptx {

inline float exp2_approx(float x) { return std::exp2(x); }
inline float exp2_approx_apart(float x) { return std::exp2(x); }
inline float log2_approx(float x) { return std::log2(x); }
inline float negative_infinity() { return -INFINITY; }

}  // namespace flashpage::ptx
