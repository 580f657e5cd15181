// Loads of global memory are ordinary loads.
#pragma once
#include "hopper.h"

namespace flashpage::ptx {

template <int count>
void load_once(u32 (&words)[count], const void* from) {
  std::memcpy(words, from, sizeof words);
}

template <int count>
void load_once(u32 (&words)[count], const void* from, bool exists) {
  std::memset(words, 0, sizeof words);
  if (exists) load_once(words, from);
}

}  // namespace flashpage::ptx
