// Merging a cut unit inside the attention launch: its pieces count themselves in, the last one combines the partials in
// the plan's order, so that the bits do not depend on who was last.
#pragma once
#include "flashpage/params.h"
#include "flashpage/ptx/atomic.h"
#include "flashpage/ptx/named_barrier.h"
#include "flashpage/tile/merge_weights.h"
#include "flashpage/tile/unit.h"
#include "flashpage/tile/vector4.h"

namespace flashpage {

// One thread, after a barrier behind the CTA's partial rows. The counter is left at zero for the next launch.
FP_DEVICE bool is_last_arrival(u32* counter, i32 num_pieces) {
  bool last = ptx::add_acquire_release(counter, 1) == static_cast<u32>(num_pieces) - 1;
  if (last) *counter = 0;
  return last;
}

// A job is one row and 128 columns. Where there are more warps than jobs, several share one: each sums a part of the
// partials.
template <class Traits, int warps>
struct ArrivalMerge {
  using Out = typename Traits::Out;
  static constexpr int columns_a_job = 128;
  static constexpr int jobs_a_row = ceil_div(Traits::head_dim_vo, columns_a_job);
  static constexpr int barrier = 15;  // name

  FP_DEVICE static void run(const AttentionParams& params, const MergeItem& merge, float (*sums)[columns_a_job],
                            int warp, int lane) {
    const int jobs = merge.num_rows * jobs_a_row;
    int sharers = 1;
    while (sharers * 2 * jobs <= warps && sharers * 16 < merge.num_partials + 16) sharers *= 2;
    for (int first = 0; first < jobs; first += warps / sharers) {
      int job = first + warp / sharers, share = warp % sharers;
      if (job < jobs) sum_partials(params, merge, job, share, sharers, sums[warp], lane);
      if (sharers == 1) continue;
      ptx::named_barrier(barrier, warps * 32);
      if (job < jobs && share == 0) add_shares(params, merge, job, sharers, sums + warp, lane);
    }
  }

 private:
  FP_DEVICE static void sum_partials(const AttentionParams& params, const MergeItem& merge, int job, int share,
                                     int sharers, float* sums, int lane) {
    const i32 row = job / jobs_a_row;
    const int column = job % jobs_a_row * columns_a_job + lane * 4;
    const bool inside = column < Traits::head_dim_vo;
    const i64 first = merge.partial_row + row;
    MergeWeights weights;
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
    for (int begin = 0; begin < merge.num_partials; begin += 32) {
      const int count = min_of(32, merge.num_partials - begin);
      const int mine = ceil_div(count, sharers), from = share * mine, to = min_of(count, from + mine);
      const i64 base = first + static_cast<i64>(begin) * merge.partial_stride;
      Batch batch(params, merge, base, from, inside ? to : 0, column);  // on its way before the weights are known
      weights.add_group(lane < count ? __ldcg(params.partial_lse + base + static_cast<i64>(lane) * merge.partial_stride)
                                     : ptx::negative_infinity());
      sum = scaled(sum, weights.rescale);
      for (int p = from; p < to; p += Batch::size) {
        if (p > from) batch = Batch(params, merge, base, p, inside ? to : 0, column);
#pragma unroll
        for (int i = 0; i < Batch::size; ++i) sum = add_scaled(sum, batch.values[i], weights.weight((p + i) % 32));
      }
    }
    sum = scaled(sum, weights.inverse());
    PackedRow at = unpack_row(params, merge.kv_head, merge.first_packed_row + row);
    if (job % jobs_a_row == 0 && share == 0 && lane == 0 && params.lse)
      params.lse[static_cast<i64>(merge.q_begin + at.row) * params.num_q_heads + at.head] = weights.lse();
    if (sharers > 1) {
      *reinterpret_cast<float4*>(sums + lane * 4) = sum;
    } else if (inside) {
      store4(out_row(params, merge, at) + column, sum);
    }
  }

  FP_DEVICE static void add_shares(const AttentionParams& params, const MergeItem& merge, int job, int sharers,
                                   float (*sums)[columns_a_job], int lane) {
    const int column = job % jobs_a_row * columns_a_job + lane * 4;
    if (column >= Traits::head_dim_vo) return;
    float4 sum = *reinterpret_cast<const float4*>(sums[0] + lane * 4);
    for (int i = 1; i < sharers; ++i) sum = add_scaled(sum, *reinterpret_cast<const float4*>(sums[i] + lane * 4), 1.f);
    PackedRow at = unpack_row(params, merge.kv_head, merge.first_packed_row + job / jobs_a_row);
    store4(out_row(params, merge, at) + column, sum);
  }

  FP_DEVICE static Out* out_row(const AttentionParams& params, const MergeItem& merge, const PackedRow& at) {
    return static_cast<Out*>(params.out) + (merge.q_begin + at.row) * params.out_row_stride +
           at.head * params.out_head_stride;
  }

  // Neighbouring partials of one row, all loads in flight at once; those from `to` on are zero. Past the L1: other SMs
  // wrote them.
  struct Batch {
    static constexpr int size = 8;
    float4 values[size];

    FP_DEVICE Batch(const AttentionParams& params, const MergeItem& merge, i64 base, int from, int to, int column) {
#pragma unroll
      for (int i = 0; i < size; ++i) {
        i64 partial = base + static_cast<i64>(from + i) * merge.partial_stride;
        values[i] = from + i < to ? __ldcg(reinterpret_cast<const float4*>(
                                        params.partial_out + partial * Traits::head_dim_vo + column))
                                  : make_float4(0.f, 0.f, 0.f, 0.f);
      }
    }
  };
};

}  // namespace flashpage
