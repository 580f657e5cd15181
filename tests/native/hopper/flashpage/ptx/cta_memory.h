// The part of the fibers' shared memory that a CTA of a cluster has.
#pragma once
#include "hopper.h"

namespace flashpage::ptx {

template <class Shared>
Shared& cta_memory() {
  return *reinterpret_cast<Shared*>(memory + card::cta_rank() * hopper::cta_bytes);
}

}  // namespace flashpage::ptx
