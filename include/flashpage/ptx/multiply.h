// Integer products.
#pragma once
#include "flashpage/common/types.h"

namespace flashpage::ptx {

FP_DEVICE i64 multiply_wide(i32 a, i32 b) {
  i64 product;
  asm("mul.wide.s32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
  return product;
}

}  // namespace flashpage::ptx
