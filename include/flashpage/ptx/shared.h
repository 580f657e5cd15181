// Shared-memory addresses as the 32-bit numbers that PTX instructions take.
#pragma once
#include "flashpage/common/types.h"

namespace flashpage::ptx {

FP_DEVICE u32 shared_address(const void* pointer) { return static_cast<u32>(__cvta_generic_to_shared(pointer)); }

// Not ordered with ordinary accesses by itself, like a copy: barriers are.
FP_DEVICE void store_shared(u32 address, u32 first, u32 second) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(address), "r"(first), "r"(second));
}

FP_DEVICE void store_shared(u32 address, u32 first, u32 second, u32 third, u32 fourth) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(first), "r"(second), "r"(third),
               "r"(fourth));
}

FP_DEVICE void load_shared(u32 (&words)[4], u32 address) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address));
}
FP_DEVICE void load_shared(u32 (&words)[2], u32 address) {
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "r"(address));
}

FP_DEVICE u32 load_shared(u32 address) {
  u32 value;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(address));
  return value;
}

}  // namespace flashpage::ptx
