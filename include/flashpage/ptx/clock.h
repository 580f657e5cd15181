// Clock and SM number, for traces.
#pragma once
#include "flashpage/common/types.h"

namespace flashpage::ptx {

FP_DEVICE u64 nanoseconds() {
  u64 now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
  return now;
}

FP_DEVICE u32 sm_index() {
  u32 index;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(index));
  return index;
}

}  // namespace flashpage::ptx
