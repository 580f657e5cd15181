// cp.async on the host: some copies are done at once, others when the thread waits for them, or some time after it has
// named a barrier that counts them.
#pragma once
#include <utility>

#include "hopper.h"

namespace hopper {

inline std::map<u32, std::vector<std::function<void()>>> row_copies;  // of each thread

inline std::vector<std::function<void()>> take_row_copies() { return std::exchange(row_copies[card::fiber], {}); }

}  // namespace hopper

namespace flashpage::ptx {

template <int bytes>
void cp_async_first(u32 shared, const void* global, int valid_bytes) {
  const auto copy = [=] {
    std::memset(hopper::at(shared), 0, bytes);
    std::memcpy(hopper::at(shared), global, valid_bytes);
  };
  if (hopper::random_number() % 4 == 0) return copy();
  hopper::row_copies[card::fiber].push_back(copy);
}
template <int bytes>
void cp_async(u32 shared, const void* global, bool exists) {
  cp_async_first<bytes>(shared, global, exists ? bytes : 0);
}
template <int bytes>
void cp_async(u32 shared, const void* global, bool exists, u64) {
  cp_async<bytes>(shared, global, exists);
}
inline void cp_async_commit() {}
template <int pending>
void cp_async_wait() {
  static_assert(pending == 0);
  for (const auto& copy : hopper::take_row_copies()) copy();
}

}  // namespace flashpage::ptx
