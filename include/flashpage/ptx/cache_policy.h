// createpolicy: how long the L2 keeps what an access brings, sm_80 and newer.
#pragma once
#include "flashpage/common/types.h"

namespace flashpage::ptx {

// For data that is read once: it goes first, so that what is read again stays.
FP_DEVICE u64 evict_first() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

}  // namespace flashpage::ptx
