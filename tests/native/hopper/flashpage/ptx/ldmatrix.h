// Of kernels that nobody runs here.
#pragma once
#include "flashpage/common/types.h"

namespace flashpage::ptx {

void ldmatrix_x4(u32 (&)[4], u32);
void ldmatrix_x4_trans(u32 (&)[4], u32);

}  // namespace flashpage::ptx
