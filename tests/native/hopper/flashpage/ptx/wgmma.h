// Products of a warpgroup that read shared memory when they are issued. Their sums are fp32.
#pragma once
#include "hopper.h"

namespace flashpage::ptx {

// An address, and how far it is to the next block of columns.
struct Matrix {
  u32 address, next_block;

  Matrix(u32 address, u32 next_block) : address(address), next_block(next_block) {}
  u64 at(u32 bytes) const { return static_cast<u64>(next_block) << 32 | (address + bytes); }
};

inline void wgmma_fence() {}
inline void wgmma_commit() {}
template <int pending>
void wgmma_wait() {}
inline void wgmma_wait_apart() {}
template <int tiles>
void wgmma_settle(float (&)[tiles][4]) {}

}  // namespace flashpage::ptx
