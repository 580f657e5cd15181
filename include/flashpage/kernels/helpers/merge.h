// Combines the partials of cut units and writes to out, one warp for each row, in the plan's fixed order, so that
// results are reproducible. Where rows have many columns, each warp merges 128 columns of one.
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
  static constexpr bool by_columns = Traits::by_columns;  // a warp has one step of a row's columns

  FP_DEVICE static void run(const MergeParams& params) {
    ptx::grid_dependency_wait();
    const PlanHeader* plan = params.plan;
    const MergeItem* merges = plan_merges(plan);
    const i32 shares = ceil_div(plan->merge_rows, warps);  // CTAs that share an item's rows
    const i32 parts = by_columns ? ceil_div(params.head_dim_vo, columns_a_step) : 1;
    for (i32 i = blockIdx.x; i < plan->num_merges * shares * parts; i += gridDim.x) {
      const i32 share = i / parts, first = i % parts * columns_a_step;
      const MergeItem item = merges[share / shares];
      const i32 row = share % shares * warps + static_cast<i32>(threadIdx.x / 32);
      const i32 end = by_columns ? min_of(first + columns_a_step, params.head_dim_vo) : params.head_dim_vo;
      if (row < item.num_rows) merge_row(params, item, row, first, end);
    }
    ptx::grid_dependency_launch();
  }

 private:
  FP_DEVICE static void merge_row(const MergeParams& params, const MergeItem& item, i32 row, i32 first_column,
                                  i32 end) {
    int lane = threadIdx.x % 32;
    i64 first = item.partial_row + row;
    u32 q_row, head_in_group;
    params.group.divmod(item.first_packed_row + row, q_row, head_in_group);
    i64 out_row = item.q_begin + q_row;
    i32 head = item.kv_head * params.group.divisor + head_in_group;
    Out* out = static_cast<Out*>(params.out) + out_row * params.out_row_stride + head * params.out_head_stride;

    for (int step = first_column; step < end; step += columns_a_step) {
      int column = step + lane * 4;
      bool inside = column < end;
      MergeWeights weights;
      float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
      for (int begin = 0; begin < item.num_partials; begin += 32) {
        int count = min_of(32, item.num_partials - begin);
        i64 base = first + static_cast<i64>(begin) * item.partial_stride;
        Batch batch(params, item, base, 0, inside ? count : 0, column);  // in flight before the weights are known
        weights.add_group(lane < count ? params.partial_lse[base + static_cast<i64>(lane) * item.partial_stride]
                                       : ptx::negative_infinity());
        sum = scaled(sum, weights.rescale);
        for (int p = 0; p < count; p += Batch::size) {
          if (p > 0) batch = Batch(params, item, base, p, inside ? count : 0, column);
#pragma unroll
          for (int i = 0; i < Batch::size; ++i) sum = add_scaled(sum, batch.values[i], weights.weight((p + i) % 32));
        }
      }
      if (inside) store4(out + column, scaled(sum, weights.inverse()));
      if (step == 0 && lane == 0 && params.lse) params.lse[out_row * params.num_q_heads + head] = weights.lse();
    }
  }

  // Consecutive partials of one row, all loads in flight at once; those from `count` on are zero.
  struct Batch {
    static constexpr int size = by_columns ? 16 : 8;
    float4 values[size];

    FP_DEVICE Batch(const MergeParams& params, const MergeItem& item, i64 base, int first, int count, int column) {
#pragma unroll
      for (int i = 0; i < size; ++i) {
        i64 partial = base + static_cast<i64>(first + i) * item.partial_stride;
        values[i] = first + i < count ? load4(params.partial_out + partial * params.head_dim_vo + column)
                                      : make_float4(0.f, 0.f, 0.f, 0.f);
      }
    }
  };
};

}  // namespace flashpage
