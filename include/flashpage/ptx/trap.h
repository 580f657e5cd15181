// Ends the launch with an error, after which the process's CUDA context is lost.
#pragma once
#include "flashpage/common/types.h"

namespace flashpage::ptx {

FP_DEVICE void trap() { asm volatile("trap;"); }

}  // namespace flashpage::ptx
