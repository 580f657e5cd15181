// Operand descriptors for wgmma, the matrix product of a warpgroup (sm_90a), and the order between products and
// ordinary register accesses. The products themselves are rendered (flashpage/kernels/wgmma_source.py).
#pragma once
#include "flashpage/common/types.h"

namespace flashpage::ptx {

// Descriptor of a matrix in shared memory: panels of 128-byte rows with the copy engine's 128-byte swizzle
// (tile/layout/swizzled_rows.h). `next_panel`: bytes from panel to panel, if the product's long side runs across
// panels. It has two halves, because moving a matrix (adding to its address) changes only the low one.
struct Matrix {
  static constexpr u32 eight_rows = 1024 / 16, swizzle_128 = 1u << 30;
  u32 low, high = swizzle_128 | eight_rows;

  // Broadcasts lane 0's address, so that the compiler knows that the warp shares it and moves it in uniform registers.
  FP_DEVICE Matrix(u32 address, u32 next_panel)
      : low(__shfl_sync(0xffffffff, next_panel / 16 << 16 | (address & 0x3ffff) / 16, 0)) {}
  // A matrix in a place that is the same for all threads of the CTA: the compiler knows that without a shuffle.
  FP_DEVICE static Matrix of_cta(u32 address) { return Matrix((address & 0x3ffff) / 16); }
  FP_DEVICE Matrix moved_by(u32 bytes) const { return Matrix(low + bytes / 16); }
  FP_DEVICE u64 at(u32 bytes) const { return static_cast<u64>(high) << 32 | (low + bytes / 16); }

 private:
  FP_DEVICE explicit Matrix(u32 low) : low(low) {}
};

// As Matrix, for one panel of 64-byte rows with the copy engine's 64-byte swizzle.
struct NarrowMatrix {
  u32 low, high;

  FP_DEVICE explicit NarrowMatrix(u32 address) : low(__shfl_sync(0xffffffff, (address & 0x3ffff) / 16, 0)) {
    constexpr u32 eight_rows = 512 / 16, swizzle_64 = 2u << 30;
    high = swizzle_64 | eight_rows;
  }
  FP_DEVICE u64 at(u32 bytes) const { return static_cast<u64>(high) << 32 | (low + bytes / 16); }
};

// Orders ordinary accesses to registers before the products that follow and use these registers.
FP_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

FP_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most `pending` of the newest committed groups are in flight.
template <int pending>
FP_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// Fixes the accumulators' values at this point: after a wait, no use of them moves before it; before a wait, no
// computation of them moves after it.
template <int tiles>
FP_DEVICE void wgmma_settle(float (&accumulators)[tiles][4]) {
#pragma unroll
  for (int n = 0; n < tiles; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) asm volatile("" : "+f"(accumulators[n][e])::"memory");
}
// Fixes the values of these factors at this point.
template <int steps>
FP_DEVICE void wgmma_settle(u32 (&factors)[steps][4]) {
#pragma unroll
  for (int step = 0; step < steps; ++step)
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(factors[step][i])::"memory");
}

}  // namespace flashpage::ptx
