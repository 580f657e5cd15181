// ldmatrix: loads four 8 x 8 matrices of 16-bit elements from shared memory in the fragment layout of mma.
#pragma once
#include "flashpage/common/types.h"

namespace flashpage::ptx {

// Lane l gives the address of row l % 8 of matrix l / 8. Register i holds matrix i: row lane / 4, elements 2 * (lane %
// 4) + {0, 1}.
FP_DEVICE void ldmatrix_x4(u32 (&r)[4], u32 shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared));
}

// As above with each matrix transposed: register i holds column lane / 4, rows 2 * (lane % 4) + {0, 1}.
FP_DEVICE void ldmatrix_x4_trans(u32 (&r)[4], u32 shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared));
}

}  // namespace flashpage::ptx
