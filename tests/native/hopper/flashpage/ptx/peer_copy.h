// Copies to the other CTA's shared memory that land later, in any order; the barrier then counts their bytes.
#pragma once
#include "flashpage/ptx/mbarrier.h"
#include "hopper.h"

namespace flashpage::ptx {

inline void copy_to_peer(u32 to, u32 from, u32 bytes, u32 barrier) {
  if ((to | from | bytes) % 16 != 0) hopper::stop("a bulk copy that is not aligned");
  hopper::copies.push_back([=] {
    std::memcpy(hopper::at(to), hopper::at(from), bytes);
    hopper::Barrier& there = hopper::barriers.at(barrier);
    there.bytes -= bytes;
    there.settle();
  });
}

}  // namespace flashpage::ptx
