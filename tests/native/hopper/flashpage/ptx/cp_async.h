// cp.async on the host: some copies are done at once, others when the thread waits for them, or some time after it has
// named a barrier that counts them.
#pragma once
#include <utility>

#include "hopper.h"

namespace hopper {

// A thread's copies in flight, with the number of their group.
struct RowCopies {
  std::vector<std::pair<int, std::function<void()>>> copies;
  int group = 0;  // that the next commit ends

  // Removes and returns those of all groups before `end`.
  std::vector<std::function<void()>> take(int end) {
    std::vector<std::function<void()>> taken;
    auto kept = copies.begin();
    for (auto& [group, copy] : copies) {
      if (group < end)
        taken.push_back(std::move(copy));
      else
        *kept++ = {group, std::move(copy)};
    }
    copies.erase(kept, copies.end());
    return taken;
  }
};
inline std::map<u32, RowCopies> row_copies;  // of each thread

inline std::vector<std::function<void()>> take_row_copies() {
  RowCopies& own = row_copies[card::fiber];
  return own.take(own.group + 1);
}

}  // namespace hopper

namespace flashpage::ptx {

template <int bytes>
void cp_async_first(u32 shared, const void* global, int valid_bytes) {
  if ((reinterpret_cast<u64>(global) | shared) % bytes != 0) hopper::stop("a copy of an address that is not on its bytes");
  const auto copy = [=] {
    std::memset(hopper::at(shared), 0, bytes);
    std::memcpy(hopper::at(shared), global, valid_bytes);
  };
  if (hopper::random_number() % 4 == 0) return copy();
  hopper::RowCopies& own = hopper::row_copies[card::fiber];
  own.copies.push_back({own.group, copy});
}
template <int bytes>
void cp_async(u32 shared, const void* global, bool exists) {
  cp_async_first<bytes>(shared, global, exists ? bytes : 0);
}
template <int bytes>
void cp_async(u32 shared, const void* global, bool exists, u64) {
  cp_async<bytes>(shared, global, exists);
}
inline void cp_async_commit() { ++hopper::row_copies[card::fiber].group; }
template <int pending>
void cp_async_wait() {
  hopper::RowCopies& own = hopper::row_copies[card::fiber];
  for (const auto& copy : own.take(own.group - pending)) copy();
}

}  // namespace flashpage::ptx
