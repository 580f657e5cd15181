// ld.global to registers for data that is read once and never written during the launch: it bypasses the L1.
#pragma once
#include "flashpage/common/types.h"

namespace flashpage::ptx {

// Loads four or two words, aligned to their size. Volatile: these loads keep their order.
FP_DEVICE void load_once(u32 (&words)[4], const void* from) {
  asm volatile("ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "l"(from));
}
FP_DEVICE void load_once(u32 (&words)[2], const void* from) {
  asm volatile("ld.global.nc.L1::no_allocate.v2.b32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "l"(from));
}

// As above, or zeros if `exists` is false. No branch: the compiler would move other uses of the words after it, and
// wait for each load there.
FP_DEVICE void load_once(u32 (&words)[4], const void* from, bool exists) {
  asm volatile(
      "{\n.reg .pred p;\n"
      "setp.ne.b32 p, %5, 0;\n"
      "mov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
      "@p ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];\n}"
      : "=&r"(words[0]), "=&r"(words[1]), "=&r"(words[2]), "=&r"(words[3])
      : "l"(from), "r"(static_cast<u32>(exists)));
}
}  // namespace flashpage::ptx
