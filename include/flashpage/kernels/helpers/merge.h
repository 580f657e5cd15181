// Combines the partials of cut units and writes to out, one warp for each row, in the plan's fixed order, so that
// results are reproducible. Units that the attention launch has merged are left out. Where rows have many columns and
// are few, each warp merges 128 columns of one.
#pragma once
#include "flashpage/params/params.h"
#include "flashpage/ptx/griddepcontrol.h"
#include "flashpage/tile/layout/vector4.h"
#include "flashpage/tile/merge/merge_weights.h"

namespace flashpage {

template <class Traits>
struct Merge {
  using Out = typename Traits::Out;
  static constexpr int warps = 8;  // flashpage/kernels/tile.py, MERGE_CTA_ROWS
  static constexpr int threads = 32 * warps;
  static constexpr int shared_bytes = 0, ctas_per_sm = 2, cluster_rows = 0;
  static constexpr int columns_a_step = 32 * 4;           // flashpage/kernels/tile.py, MERGE_COLUMNS
  static constexpr bool by_columns = Traits::by_columns;  // rows have many columns
  static constexpr int most_steps = 4;                    // of a row's columns that a warp loads at the same time
  // Rows that are enough for whole rows by warps: half of the warps that a card of 132 SMs has at once.
  static constexpr int enough_rows = 1024;

  FP_DEVICE static void run(const MergeParams& params) {
    ptx::grid_dependency_wait();
    const PlanHeader* plan = params.plan;
    const MergeItem* merges = plan_merges(plan);
    const i32 shares = ceil_div(plan->merge_rows, warps);  // CTAs that share an item's rows
    const bool is_divided = by_columns && plan->num_merges * plan->merge_rows < enough_rows;
    const i32 parts = is_divided ? ceil_div(params.head_dim_vo, columns_a_step) : 1;
    const i32 all = plan->cluster_size > 0 ? 0 : plan->num_merges * shares * parts;  // clusters merge their units
    for (i32 i = blockIdx.x; i < all; i += gridDim.x) {
      const i32 share = i / parts, first = i % parts * columns_a_step;
      const MergeItem item = merges[share / shares];
      const i32 row = share % shares * warps + static_cast<i32>(threadIdx.x / 32);
      if (row >= item.num_rows || item.num_partials <= params.most_pieces_merged) continue;
      if (is_divided) {
        merge_columns<1, 16>(params, item, row, first, min_of(first + columns_a_step, params.head_dim_vo));
      } else {
        constexpr int steps = by_columns ? most_steps : 1;
        merge_columns<steps, by_columns ? 4 : 8>(params, item, row, 0, params.head_dim_vo);
      }
    }
    ptx::grid_dependency_launch();
  }

 private:
  // Merges columns of a row: `steps` times 128 and `size` partials at the same time.
  template <int steps, int size>
  FP_DEVICE static void merge_columns(const MergeParams& params, const MergeItem& item, i32 row, i32 first_column,
                                      i32 end) {
    using Loads = Batch<steps, size>;
    int lane = threadIdx.x % 32;
    i64 first = item.partial_row + row;
    u32 q_row, head_in_group;
    params.group.divmod(item.first_packed_row + row, q_row, head_in_group);
    i64 out_row = item.q_begin + q_row;
    i32 head = item.kv_head * params.group.divisor + head_in_group;
    Out* out = static_cast<Out*>(params.out) + out_row * params.out_row_stride + head * params.out_head_stride;

    for (int step = first_column; step < end; step += columns_a_step * steps) {
      const int column = step + lane * 4;
      MergeWeights weights;
      float4 sums[steps] = {};
      for (int begin = 0; begin < item.num_partials; begin += 32) {
        int count = min_of(32, item.num_partials - begin);
        i64 base = first + static_cast<i64>(begin) * item.partial_stride;
        Loads loads(params, item, base, 0, count, column, end);  // in flight before the weights are known
        weights.add_group(lane < count ? params.partial_lse[base + static_cast<i64>(lane) * item.partial_stride]
                                       : ptx::negative_infinity());
#pragma unroll
        for (int s = 0; s < steps; ++s) sums[s] = scaled(sums[s], weights.rescale);
        for (int p = 0; p < count; p += size) {
          if (p > 0) loads = Loads(params, item, base, p, count, column, end);
#pragma unroll
          for (int i = 0; i < size; ++i) {
            const float weight = weights.weight((p + i) % 32);
#pragma unroll
            for (int s = 0; s < steps; ++s) sums[s] = add_scaled(sums[s], loads.values[i][s], weight);
          }
        }
      }
#pragma unroll
      for (int s = 0; s < steps; ++s)
        if (column + s * columns_a_step < end)
          store4(out + column + s * columns_a_step, scaled(sums[s], weights.inverse()));
      if (step == 0 && lane == 0 && params.lse) params.lse[out_row * params.num_q_heads + head] = weights.lse();
    }
  }

  // Consecutive partials of one row, all loads in flight at once; those from `count` on are zero.
  template <int steps, int size>
  struct Batch {
    float4 values[size][steps];

    FP_DEVICE Batch(const MergeParams& params, const MergeItem& item, i64 base, int first, int count, int column,
                    int end) {
#pragma unroll
      for (int i = 0; i < size; ++i) {
        const i64 partial = base + static_cast<i64>(first + i) * item.partial_stride;
        const float* from = params.partial_out + partial * params.head_dim_vo + column;
#pragma unroll
        for (int s = 0; s < steps; ++s)
          values[i][s] = first + i < count && column + s * columns_a_step < end ? load4(from + s * columns_a_step)
                                                                                : make_float4(0.f, 0.f, 0.f, 0.f);
      }
    }
  };
};

}  // namespace flashpage
