// Adds what two groups of warps computed of the same rows; each group gets one half of the columns.
#pragma once
#include "flashpage/tile/softmax/softmax.h"

namespace flashpage {

// Threads of the same number in both groups hold the same rows and columns: `row_tiles` x `value_tiles` tiles.
template <int row_tiles, int value_tiles, int group_threads, int memory_bytes>
struct ColumnHalves {
  static constexpr int tiles = value_tiles / 2;          // of a half
  static constexpr int parts = row_tiles * (1 + tiles);  // 16 bytes each: maxima and sums, then tiles
  static_assert(value_tiles % 2 == 0 && 2 * parts * group_threads * 16 <= memory_bytes);

  // For group `mine`, which keeps the half of its number. Called by all threads of the CTA, with a barrier before and
  // after: the parts are exchanged in `memory`.
  template <int mine>
  FP_DEVICE static void add(SoftmaxState<row_tiles>& state, float (&values)[row_tiles][value_tiles][4], u8* memory,
                            int thread) {
    float4* const given = reinterpret_cast<float4*>(memory) + mine * parts * group_threads + thread;
    const float4* const taken = reinterpret_cast<float4*>(memory) + (1 - mine) * parts * group_threads + thread;
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) {
      given[m * group_threads] =
          make_float4(state.maximum[m][0], state.maximum[m][1], state.sum[m][0], state.sum[m][1]);
#pragma unroll
      for (int n = 0; n < tiles; ++n) {
        const float (&tile)[4] = values[m][(1 - mine) * tiles + n];
        given[(row_tiles + m * tiles + n) * group_threads] = make_float4(tile[0], tile[1], tile[2], tile[3]);
      }
    }
    __syncthreads();
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) {
      const float4 other = taken[m * group_threads];
      const float maximum[2] = {other.x, other.y}, sum[2] = {other.z, other.w};
      float kept[2], added[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float common = fmaxf(state.maximum[m][half], maximum[half]);
        kept[half] = state_weight(state.maximum[m][half], common);
        added[half] = state_weight(maximum[half], common);
        state.maximum[m][half] = common;
        state.sum[m][half] = kept[half] * state.sum[m][half] + added[half] * sum[half];
      }
#pragma unroll
      for (int n = 0; n < tiles; ++n) {
        float (&tile)[4] = values[m][mine * tiles + n];
        const float4 part = taken[(row_tiles + m * tiles + n) * group_threads];
        tile[0] = kept[0] * tile[0] + added[0] * part.x;
        tile[1] = kept[0] * tile[1] + added[0] * part.y;
        tile[2] = kept[1] * tile[2] + added[1] * part.z;
        tile[3] = kept[1] * tile[3] + added[1] * part.w;
      }
    }
  }
};

}  // namespace flashpage
