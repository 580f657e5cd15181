// cp.async on the host: some copies are done at once, others when the thread waits for them, or some time after it has
// named a barrier that counts them.
#pragma once
#include <memory>
#include <utility>

#include "hopper.h"

namespace hopper {

// A copy in flight, for which both its thread and barriers may wait.
struct RowCopy {
  int group;
  std::function<void()> copy;  // empty when it has been done

  void land() {
    if (copy) std::exchange(copy, nullptr)();
  }
};

struct RowCopies {  // of a thread
  std::vector<std::shared_ptr<RowCopy>> copies;
  int group = 0;  // that the next commit ends

  void land(int end) {  // those of all groups before `end`
    for (const auto& copy : copies)
      if (copy->group < end) copy->land();
    std::erase_if(copies, [](const auto& copy) { return !copy->copy; });
  }
};
inline std::map<u32, RowCopies> row_copies;  // of each thread

}  // namespace hopper

namespace flashpage::ptx {

template <int bytes>
void cp_async_first(u32 shared, const void* global, int valid_bytes) {
  if ((reinterpret_cast<u64>(global) | shared) % bytes != 0)
    hopper::stop("a copy of an address that is not on its bytes");
  const auto copy = [=] {
    std::memset(hopper::at(shared), 0, bytes);
    std::memcpy(hopper::at(shared), global, valid_bytes);
  };
  if (hopper::random_number() % 4 == 0) return copy();
  hopper::RowCopies& own = hopper::row_copies[card::fiber];
  own.copies.push_back(std::make_shared<hopper::RowCopy>(own.group, copy));
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
  own.land(own.group - pending);
}

}  // namespace flashpage::ptx
