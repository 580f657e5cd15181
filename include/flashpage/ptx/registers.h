// setmaxnreg: moves registers from the loading warps to the computing ones, from sm_90a on. Called by whole warpgroups.
#pragma once
#include "flashpage/common/types.h"

namespace flashpage::ptx {

template <int count>
FP_DEVICE void give_registers_back() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}
template <int count>
FP_DEVICE void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}

// Whichever of the two is needed.
template <int before, int after>
FP_DEVICE void change_registers() {
  if constexpr (after > before) {
    take_registers<after>();
  } else if constexpr (after < before) {
    give_registers_back<after>();
  }
}

}  // namespace flashpage::ptx
