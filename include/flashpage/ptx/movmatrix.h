// movmatrix: transposes an 8 x 8 matrix of 16-bit elements across a warp, sm_75.
#pragma once
#include "flashpage/common/types.h"

namespace flashpage::ptx {

// Lane l has elements 2 * (l % 4) + {0, 1} of row l / 4, before and after.
FP_DEVICE u32 transpose_matrix(u32 pair) {
  u32 transposed;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(pair));
  return transposed;
}

}  // namespace flashpage::ptx
