// Copies of single rows, done at once.
#pragma once
#include "hopper.h"

namespace flashpage::ptx {

template <int bytes>
void cp_async(u32 shared, const void* global, bool exists) {
  if (exists) {
    std::memcpy(hopper::at(shared), global, bytes);
  } else {
    std::memset(hopper::at(shared), 0, bytes);
  }
}
template <int bytes>
void cp_async(u32 shared, const void* global, bool exists, u64) {
  cp_async<bytes>(shared, global, exists);
}
inline void cp_async_commit() {}
template <int pending>
void cp_async_wait() {}

}  // namespace flashpage::ptx
