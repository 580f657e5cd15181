// Combines the partials of cut units and writes to out, in the plan's fixed order, so that results are reproducible.
// Units that the attention launch has merged are left out. A warp merges a row, or, where rows have many columns and
// are few, 128 columns of one; if such jobs are few, several warps share one, and each sums some of the partials.
#pragma once
#include "flashpage/params/params.h"
#include "flashpage/ptx/griddepcontrol.h"
#include "flashpage/tile/layout/vector4.h"
#include "flashpage/tile/merge/merge_weights.h"

namespace flashpage {

template <class Traits>
struct Merge {
  using Out = typename Traits::Out;
  static constexpr int log_warps = 3, warps = 1 << log_warps;
  static constexpr int threads = 32 * warps;
  static constexpr int ctas_per_sm = 2, cluster_rows = 0;
  static constexpr int columns_a_step = 32 * 4;           // flashpage/kernels/tile.py, MERGE_COLUMNS
  static constexpr bool by_columns = Traits::by_columns;  // rows have many columns
  static constexpr int most_steps = 4;                    // of a row's columns that a warp loads at the same time
  static constexpr bool is_early = !by_columns;           // an item is read ahead; many columns leave no registers
  // A card of 132 SMs has 2,112 warps of this kernel at once. From half as many rows on, each has a warp, and jobs are
  // shared as long as that takes at most twice as many warps.
  static constexpr int enough_rows = 1024, enough_jobs = 4096;

  struct Shared {
    float4 sums[warps][32];
    float2 states[warps];  // maximum and total
  };
  static constexpr int shared_bytes = sizeof(Shared);

  FP_DEVICE static void run(const MergeParams& params) {
    // The plan is there: what wrote it had ended before the attention launch let this one begin.
    const PlanHeader* plan = params.plan;
    const MergeItem* merges = plan_merges(plan);
    const i32 rows = plan->cluster_size > 0 ? 0 : plan->num_merges * plan->merge_rows;  // clusters merge their units
    const bool is_divided = by_columns && rows < enough_rows;
    const i32 parts = is_divided ? ceil_div(params.head_dim_vo, columns_a_step) : 1;
    int shift = 0;  // log2 of the warps that share a job
    if (!params.is_batch_invariant && params.head_dim_vo <= columns_a_step * parts) {
      while (shift < log_warps && rows * parts << (shift + 1) <= enough_jobs) ++shift;
    }
    const int warp = threadIdx.x / 32;
    const i32 cta_rows = warps >> shift, shares = ceil_div(plan->merge_rows, cta_rows);  // CTAs of an item's rows
    const i32 all = rows == 0 ? 0 : plan->num_merges * shares * parts;
    const auto item_of = [&](i32 i) { return merges[i / parts / shares]; };
    i32 i = blockIdx.x;
    MergeItem next = is_early && i < all ? item_of(i) : MergeItem{};
    ptx::grid_dependency_wait();
    while (i < all) {
      const MergeItem item = is_early ? next : item_of(i);
      const i32 first = i % parts * columns_a_step, row = i / parts % shares * cta_rows;
      if (row < item.num_rows && !is_merged(params, item)) {
        if (is_divided || shift > 0) {
          merge_together(params, item, row + (warp >> shift), first, warp, shift);
        } else if (row + warp < item.num_rows) {
          merge_row(params, item, row + warp);
        }
      }
      i += gridDim.x;
      if (is_early && i < all) next = item_of(i);
    }
    ptx::grid_dependency_launch();
  }

 private:
  FP_DEVICE static bool is_merged(const MergeParams& params, const MergeItem& item) {
    const i32 jobs = item.num_rows * ceil_div(params.head_dim_vo, columns_a_step);
    return params.most_merge_rounds > 0 && merge_rounds(item.num_partials, jobs) <= params.most_merge_rounds;
  }

  // Sums some partials of a row in `steps` times 128 columns, `size` partials at the same time.
  template <int steps, int size>
  FP_DEVICE static void sum_partials(float4 (&sums)[steps], MergeWeights& weights, const MergeParams& params,
                                     const MergeItem& item, i32 row, i32 from, i32 to, int column, i32 end) {
    using Loads = Batch<steps, size>;
    const int lane = threadIdx.x % 32;
    for (int begin = from; begin < to; begin += 32) {
      const int count = min_of(32, to - begin);
      const i64 base = item.partial_row + row + static_cast<i64>(begin) * item.partial_stride;
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
  }

  // Where a row goes.
  struct Target {
    Out* out;
    float* lse;  // null: not wanted

    FP_DEVICE Target(const MergeParams& params, const MergeItem& item, i32 row) {
      u32 q_row, head_in_group;
      params.group.divmod(item.first_packed_row + row, q_row, head_in_group);
      const i64 out_row = item.q_begin + q_row;
      const i32 head = item.kv_head * params.group.divisor + head_in_group;
      out = static_cast<Out*>(params.out) + out_row * params.out_row_stride + head * params.out_head_stride;
      lse = params.lse ? params.lse + out_row * params.num_q_heads + head : nullptr;
    }
  };

  FP_DEVICE static void merge_row(const MergeParams& params, const MergeItem& item, i32 row) {
    constexpr int steps = by_columns ? most_steps : 1, size = by_columns ? 4 : 8;
    const int lane = threadIdx.x % 32;
    const i32 end = params.head_dim_vo;
    const Target target(params, item, row);
    for (int step = 0; step < end; step += columns_a_step * steps) {
      const int column = step + lane * 4;
      MergeWeights weights;
      float4 sums[steps] = {};
      sum_partials<steps, size>(sums, weights, params, item, row, 0, item.num_partials, column, end);
#pragma unroll
      for (int s = 0; s < steps; ++s)
        if (column + s * columns_a_step < end)
          store4(target.out + column + s * columns_a_step, scaled(sums[s], weights.inverse()));
      if (step == 0 && lane == 0 && target.lse) *target.lse = weights.lse();
    }
  }

  // Merges 128 columns of a row, whose partials 1 << shift neighbouring warps share. Called by all warps, also by those
  // of rows that do not exist.
  FP_DEVICE static void merge_together(const MergeParams& params, const MergeItem& item, i32 row, i32 first_column,
                                       int warp, int shift) {
    extern __shared__ __align__(1024) u8 memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int lane = threadIdx.x % 32, column = first_column + lane * 4, slice = warp & ((1 << shift) - 1);
    const i32 end = min_of(first_column + columns_a_step, params.head_dim_vo);
    const auto first_of = [&](int slice) { return item.num_partials * slice >> shift; };
    const bool exists = row < item.num_rows;
    if (exists) {
      MergeWeights weights;
      float4 sums[1] = {};
      sum_partials<1, 8>(sums, weights, params, item, row, first_of(slice), first_of(slice + 1), column, end);
      shared.sums[warp][lane] = sums[0];
      if (lane == 0) shared.states[warp] = make_float2(weights.maximum, weights.total);
    }
    __syncthreads();
    if (exists && slice == 0) {
      MergeWeights weights;
      float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
      for (int i = 0; i < 1 << shift; ++i) weights.maximum = fmaxf(weights.maximum, shared.states[warp + i].x);
      for (int i = 0; i < 1 << shift; ++i) {
        const float weight = state_weight(shared.states[warp + i].x, weights.maximum);
        weights.total += weight * shared.states[warp + i].y;
        sum = add_scaled(sum, shared.sums[warp + i][lane], weight);
      }
      const Target target(params, item, row);
      if (column < end) store4(target.out + column, scaled(sum, weights.inverse()));
      if (first_column == 0 && lane == 0 && target.lse) *target.lse = weights.lse();
    }
    __syncthreads();  // before the next job's sums
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
