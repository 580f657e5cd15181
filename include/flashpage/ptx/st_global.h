// Stores to global memory in one instruction. The compiler splits stores of structs whose members are in registers.
#pragma once
#include "flashpage/common/types.h"

namespace flashpage::ptx {

// Stores to an address that is a multiple of 16 if `is_wanted`. Predicated instead of branching, so that the compiler
// can mix it with the code that follows.
FP_DEVICE void store_global(void* to, const uint4& value, bool is_wanted) {
  asm volatile(
      "{\n.reg .pred wanted;\nsetp.ne.b32 wanted, %5, 0;\n@wanted st.global.v4.b32 [%0], {%1, %2, %3, %4};\n}" ::"l"(
          to),
      "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"(static_cast<int>(is_wanted))
      : "memory");
}

}  // namespace flashpage::ptx
