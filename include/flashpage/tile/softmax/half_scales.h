// The factors of a lane's scores. A lane holds two rows of each m16 tile, eight apart, and these may be of different
// query heads, which may have scales of their own.
#pragma once
#include "flashpage/common/types.h"

namespace flashpage {

struct HalfScales {
  float of_half[2];

  FP_DEVICE HalfScales(float both) : of_half{both, both} {}
  FP_DEVICE HalfScales(float first, float second) : of_half{first, second} {}
  FP_DEVICE float operator[](int half) const { return of_half[half]; }
};

}  // namespace flashpage
