// mma.sync with fp32 accumulation: m16n8k16 on sm_80 and newer, m16n8k32 of fp8 on sm_89 and newer.
#pragma once
#include "flashpage/common/types.h"

namespace flashpage::ptx {

// c[16 x 8] += a[16 x 16] * b[16 x 8]. c: row lane / 4 (+ 8 for c[2], c[3]), columns 2 * (lane % 4) + {0, 1}.
template <class T>
FP_DEVICE void mma_m16n8k16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  static_assert(is_same<T, Half> || is_same<T, Bf16>);
  if constexpr (is_same<T, Half>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// c[16 x 8] += a[16 x 32] * b[32 x 8]; each register has four neighbouring terms. The tensor cores keep some 13 bits
// below the largest of the 33 terms of a sum, and cut off the rest.
template <class T>
FP_DEVICE void mma_m16n8k32(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  static_assert(is_same<T, E4m3>);
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The product of 32 bytes of each row: 16 terms of 16 bits or 32 of 8 bits.
template <class T>
FP_DEVICE void mma_m16n8(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if constexpr (is_fp8<T>) {
    mma_m16n8k32<T>(c, a, b0, b1);
  } else {
    mma_m16n8k16<T>(c, a, b0, b1);
  }
}

}  // namespace flashpage::ptx
