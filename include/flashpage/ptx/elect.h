// elect.sync: selects one lane of the warp in a way that the compiler recognises, sm_90.
#pragma once
#include "flashpage/common/types.h"

namespace flashpage::ptx {

// Bulk copies under elect_one() compile to straight code; under `if (lane == 0)` they become a loop over lanes.
FP_DEVICE bool elect_one() {
  u32 elected;
  asm volatile("{\n.reg .pred one;\nelect.sync _|one, 0xffffffff;\nselp.u32 %0, 1, 0, one;\n}" : "=r"(elected));
  return elected;
}

}  // namespace flashpage::ptx
