// createpolicy: how long the L2 keeps the data of an access, sm_80 and newer.
#pragma once
#include "flashpage/common/types.h"

namespace flashpage::ptx {

// For data that is read once: the L2 evicts it first and keeps data that is read again.
FP_DEVICE u64 evict_first() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// For data that other SMs read soon: the L2 evicts it last.
FP_DEVICE u64 evict_last() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

}  // namespace flashpage::ptx
