// stmatrix: stores four 8 x 8 matrices of 16-bit elements from the fragment layout of mma to shared memory, sm_90.
#pragma once
#include "flashpage/common/types.h"

namespace flashpage::ptx {

// Lane l gives the address of row l % 8 of matrix l / 8. Register i holds matrix i: row lane / 4, elements 2 * (lane %
// 4) + {0, 1}.
FP_DEVICE void stmatrix_x4(u32 shared, const u32 (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
}

// As stmatrix_x4, with each matrix transposed: row i of matrix j in shared memory holds column i of the fragment.
FP_DEVICE void stmatrix_x4_trans(u32 shared, const u32 (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

}  // namespace flashpage::ptx
