// The factors of a lane's scores. A lane holds two rows of each m16 tile, eight apart, and these may be of different
// query heads, which may have scales of their own.
#pragma once
#include "flashpage/common/types.h"

namespace flashpage {

struct HalfScales {
  float of_half[2];
};

// The factor of a row: functions of the softmax take HalfScales, or a number for all rows.
FP_DEVICE float scale_of(float scale, int) { return scale; }
FP_DEVICE float scale_of(const HalfScales& scales, int half) { return scales.of_half[half]; }

}  // namespace flashpage
