// The partials of cut units into out, one warp a row, in the plan's fixed order: the same bits every time.
#pragma once
#include "flashpage/params.h"
#include "flashpage/ptx/griddepcontrol.h"
#include "flashpage/ptx/prefetch.h"
#include "flashpage/tile/merge_weights.h"
#include "flashpage/tile/vector4.h"

namespace flashpage {

template <class Traits>
struct Merge {
  using Out = typename Traits::Out;
  static constexpr int warps = 8;  // flashpage/tiles.py, MERGE_CTA_ROWS
  static constexpr int threads = 32 * warps;
  static constexpr int columns_a_step = 32 * 4;

  FP_DEVICE static void run(const MergeParams& params) {
    // The launch before has read the plan too, before it let this one begin: only partials are to be waited for.
    const PlanHeader* plan = params.plan;
    const MergeItem* merges = plan_merges(plan);
    const int shift = 31 - __clz(plan->merge_rows / warps);  // an item's rows are for a power of two of CTAs
    const i32 count = plan->num_merges << shift, step = static_cast<i32>(gridDim.x);
    const auto ask_for = [&](i32 i) {
      if (i < count) ptx::prefetch_to_l1(&merges[i >> shift]);
    };
    ask_for(blockIdx.x);
    ptx::grid_dependency_wait();
#pragma unroll 1
    for (i32 i = blockIdx.x; i < count; i += step) {
      ask_for(i + step);
      const MergeItem item = merges[i >> shift];
      const i32 row = (i & (1 << shift) - 1) * warps + static_cast<i32>(threadIdx.x / 32);
      if (row < item.num_rows) merge_row(params, item, row);
    }
    ptx::grid_dependency_launch();
  }

 private:
  FP_DEVICE static void merge_row(const MergeParams& params, const MergeItem& item, i32 row) {
    int lane = threadIdx.x % 32;
    i64 first = item.partial_row + row;
    u32 q_row, head_in_group;
    params.group.divmod(item.first_packed_row + row, q_row, head_in_group);
    i64 out_row = item.q_begin + q_row;
    i32 head = item.kv_head * params.group.divisor + head_in_group;
    Out* out = static_cast<Out*>(params.out) + out_row * params.out_row_stride + head * params.out_head_stride;

    const i64 stride = static_cast<i64>(item.partial_stride) * params.head_dim_vo;  // from one partial to the next
    const float* partials = params.partial_out + first * params.head_dim_vo;
    const float* lse = params.partial_lse + first + static_cast<i64>(lane) * item.partial_stride;
#pragma unroll 1
    for (int step = 0; step < params.head_dim_vo; step += columns_a_step) {
      const int column = step + lane * 4;
      const bool inside = column < params.head_dim_vo;
      MergeWeights weights;
      float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
      for (int begin = 0; begin < item.num_partials; begin += 32) {
        const int count = min_of(32, item.num_partials - begin);
        const float* from = partials + begin * stride + column;
        Batch batch(from, stride, inside ? count : 0);  // on its way before the weights are known
        weights.add_group(lane < count ? lse[static_cast<i64>(begin) * item.partial_stride] : ptx::negative_infinity());
        sum = scaled(sum, weights.rescale);
#pragma unroll 1
        for (int p = 0;;) {
#pragma unroll
          for (int i = 0; i < Batch::size; ++i) sum = add_scaled(sum, batch.values[i], weights.weight((p + i) % 32));
          if ((p += Batch::size) >= count) break;
          batch = Batch(from + p * stride, stride, inside ? count - p : 0);
        }
      }
      if (inside) store4(out + column, scaled(sum, weights.inverse()));
      if (step == 0 && lane == 0 && params.lse) params.lse[out_row * params.num_q_heads + head] = weights.lse();
    }
  }

  // Neighbouring partials of one row, all loads in flight at once; those from `count` on are zero.
  struct Batch {
    static constexpr int size = 4;
    float4 values[size];

    FP_DEVICE Batch(const float* from, i64 stride, int count) {
#pragma unroll
      for (int i = 0; i < size; ++i) values[i] = i < count ? load4(from + i * stride) : make_float4(0.f, 0.f, 0.f, 0.f);
    }
  };
};

}  // namespace flashpage
