// Ordinary accesses to the fibers' shared memory.
#pragma once
#include "hopper.h"

namespace flashpage::ptx {

inline u32 shared_address(const void* pointer) { return static_cast<u32>(static_cast<const u8*>(pointer) - memory); }
inline void store_shared(u32 address, u32 first, u32 second) {
  const u32 words[2] = {first, second};
  std::memcpy(hopper::at(address), words, sizeof words);
}
inline void store_shared(u32 address, u32 first, u32 second, u32 third, u32 fourth) {
  const u32 words[4] = {first, second, third, fourth};
  std::memcpy(hopper::at(address), words, sizeof words);
}
template <int count>
void load_shared(u32 (&words)[count], u32 address) {
  std::memcpy(words, hopper::at(address), sizeof words);
}
inline u32 load_shared(u32 address) {
  u32 words[1];
  load_shared(words, address);
  return words[0];
}

}  // namespace flashpage::ptx
