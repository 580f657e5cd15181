// Programmatic dependent launch (sm_90; no instruction elsewhere). Rule: every CTA, even an empty one, waits before its
// first access to global memory.
#pragma once
#include "flashpage/common/types.h"

namespace flashpage::ptx {

FP_DEVICE void grid_dependency_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

FP_DEVICE void grid_dependency_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace flashpage::ptx
