// merge_state, merge_state_in_place and merge_states: one warp for each row and head, for any number of states and
// heads.
#pragma once
#include "flashpage/params/params.h"
#include "flashpage/ptx/griddepcontrol.h"
#include "flashpage/tile/layout/vector4.h"
#include "flashpage/tile/merge/merge_weights.h"

namespace flashpage {

template <class Traits>
struct MergeStates {
  using Element = typename Traits::StoredQuery;
  static constexpr int warps = 8;
  static constexpr int threads = 32 * warps;
  static constexpr int shared_bytes = 0, ctas_per_sm = 2, cluster_rows = 0;

  FP_DEVICE static void run(const MergeStatesParams& params) {
    ptx::grid_dependency_wait();
    // A 64-bit division here would be a call; rows x heads of real tensors fit in 32 bits.
    u32 states = static_cast<u32>(params.rows) * params.num_heads;
    for (u32 i = blockIdx.x * warps + threadIdx.x / 32; i < states; i += gridDim.x * warps)
      merge_one(params, i / params.num_heads, static_cast<i32>(i % params.num_heads));
    ptx::grid_dependency_launch();
  }

 private:
  // State 1 of merge_state is a second pair of tensors; otherwise states are slices of one.
  FP_DEVICE static const Element* values_of(const MergeStatesParams& p, i32 state, i64 row, i32 head) {
    const void* base = state == 1 && p.v_other ? p.v_other : p.v;
    i64 slice = p.v_other ? 0 : state * p.v_state_stride;
    return static_cast<const Element*>(base) + slice + row * p.v_row_stride + head * p.v_head_stride;
  }
  FP_DEVICE static float lse_of(const MergeStatesParams& p, i32 state, i64 row, i32 head) {
    const float* base = state == 1 && p.s_other ? p.s_other : p.s;
    return base[(p.s_other ? 0 : state * p.s_state_stride) + row * p.s_row_stride + head];
  }

  FP_DEVICE static void merge_one(const MergeStatesParams& p, i64 row, i32 head) {
    int lane = threadIdx.x % 32;
    if (p.mask && !p.mask[row]) return;  // only merge_state_in_place has a mask, and v is its output
    i64 at = row * p.num_heads + head;
    for (int first = 0; first < p.head_dim; first += 32 * 4) {
      int column = first + lane * 4;
      bool inside = column < p.head_dim;
      MergeWeights weights;
      float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
      for (i32 begin = 0; begin < p.num_states; begin += 32) {
        i32 count = min_of(32, p.num_states - begin);
        weights.add_group(lane < count ? lse_of(p, begin + lane, row, head) : ptx::negative_infinity());
        sum = scaled(sum, weights.rescale);
        for (i32 i = 0; i < count; ++i) {
          float weight = weights.weight(i);
          // The values of a state without tokens are undefined.
          if (inside && weight > 0.f) sum = add_scaled(sum, load4(values_of(p, begin + i, row, head) + column), weight);
        }
      }
      if (inside) store4(static_cast<Element*>(p.out) + at * p.head_dim + column, scaled(sum, weights.inverse()));
      // In merge_state_in_place, lse is also this row's input, which is read again for the next columns.
      if (first + 32 * 4 >= p.head_dim && lane == 0) p.lse[at] = weights.lse();
    }
  }
};

}  // namespace flashpage
