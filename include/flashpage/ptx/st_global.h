// Stores to global memory as one instruction: the compiler splits those of structures whose parts it has in registers.
#pragma once
#include "flashpage/common/types.h"

namespace flashpage::ptx {

// To a multiple of 16 bytes, where `is_wanted`: without a branch, so that what follows mixes with it.
FP_DEVICE void store_global(void* to, const uint4& value, bool is_wanted) {
  asm volatile(
      "{\n.reg .pred wanted;\nsetp.ne.b32 wanted, %5, 0;\n@wanted st.global.v4.b32 [%0], {%1, %2, %3, %4};\n}" ::"l"(
          to),
      "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"(static_cast<int>(is_wanted))
      : "memory");
}

}  // namespace flashpage::ptx
