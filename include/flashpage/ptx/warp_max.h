// redux.sync: a reduction over the warp in one instruction, sm_80.
#pragma once
#include "flashpage/common/types.h"

namespace flashpage::ptx {

FP_DEVICE u32 warp_max(u32 x) {
  u32 most;
  asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(most) : "r"(x));
  return most;
}

// The largest number of all lanes; NaN if one is NaN (its bits are a larger integer than those of any number).
FP_DEVICE float warp_max(float x) {
  auto ordered = [](i32 bits) { return bits ^ ((bits >> 31) & 0x7fffffff); };
  i32 mine = ordered(__float_as_int(x)), most;
  asm volatile("redux.sync.max.s32 %0, %1, 0xffffffff;" : "=r"(most) : "r"(mine));
  return __int_as_float(ordered(most));
}

}  // namespace flashpage::ptx
