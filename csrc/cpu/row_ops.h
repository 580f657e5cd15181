// The inner loops over elements of a row, for the current machine: plain x86-64 or Arm, or AVX2 with half conversions.
#pragma once
#include "flashpage/common/types.h"

namespace flashpage::host {

template <class T>
struct RowOps {
  void (*add_weighted)(float* sum, const T* values, float weight, int n);  // sum += weight * values
  void (*store_scaled)(T* out, const float* sum, float scale, int n);      // out = sum * scale, rounded to nearest even
};

// T: float, Half, Bf16, E4m3.
template <class T>
const RowOps<T>& row_ops();

}  // namespace flashpage::host
