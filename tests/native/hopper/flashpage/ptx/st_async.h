// Stores that land later, in any order; the barrier then counts their bytes.
#pragma once
#include "flashpage/ptx/mbarrier.h"
#include "hopper.h"

namespace flashpage::ptx {

template <class Value>
void store_async(u32 address, const Value& value, u32 barrier) {
  if (address % sizeof value != 0) hopper::stop("a store that is not aligned");
  hopper::copies.push_back([=] {
    std::memcpy(hopper::at(address), &value, sizeof value);
    hopper::Barrier& there = hopper::barriers.at(barrier);
    there.bytes -= sizeof value;
    there.settle();
  });
}

}  // namespace flashpage::ptx
