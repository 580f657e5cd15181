// Loads of global memory are ordinary loads.
#pragma once
#include "hopper.h"

namespace flashpage::ptx {

template <int count>
void load_once(u32 (&words)[count], const void* from) {
  std::memcpy(words, from, sizeof words);
}

}  // namespace flashpage::ptx
