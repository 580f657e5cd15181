// How far scores may exceed a row's maximum before it moves.
#pragma once
#include "flashpage/ptx/math.h"

namespace flashpage {

constexpr float least_headroom = 0.25f, most_headroom = 8.f;  // in base 2

// A probability above 1 costs fp32 sums no precision, but its 16-bit factor is off by up to 2^-8 of itself, where that
// of 1 is exact. This shows in the output where few tokens have most of the sum. So a maximum moves if a score exceeds
// it by 2^8, or would have an eighth or more of the row's sum. `sum`: of one lane, relative to the maximum, where
// `lanes` lanes have the row's tokens. A sum of earlier tokens is smaller, which only moves maxima more often.
template <int lanes>
FP_DEVICE float headroom_of(float sum) {
  return fminf(fmaxf(ptx::log2_approx(sum * (lanes / 8.f)), least_headroom), most_headroom);
}

}  // namespace flashpage
