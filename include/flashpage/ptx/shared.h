// Shared-memory accesses by the 32-bit addresses that PTX instructions take.
#pragma once
#include "flashpage/ptx/cta_memory.h"

namespace flashpage::ptx {

FP_DEVICE u32 shared_address(const void* pointer) {
#if defined(__CUDACC_RTC__)
  // NVRTC's pointers to shared memory have 64 bits, so sums of them take two registers. This adds the offset in the
  // CTA's memory, which fits 32 bits, to that memory's 32-bit address.
  u32 begin;
  asm("mov.u32 %0, flashpage_memory;" : "=r"(begin));
  return begin + static_cast<u32>(__cvta_generic_to_shared(pointer) - __cvta_generic_to_shared(flashpage_memory));
#else
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
#endif
}

// Stores words. Ordinary accesses are not ordered with it, only with barriers, as for a copy.
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
