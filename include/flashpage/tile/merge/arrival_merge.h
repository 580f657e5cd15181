// Merges a cut unit inside the attention launch. Each piece increments a counter, and the CTA of the last piece
// combines the partials in the plan's order, so that the result does not depend on which piece was last.
#pragma once
#include "flashpage/params/params.h"
#include "flashpage/ptx/atomic.h"
#include "flashpage/ptx/named_barrier.h"
#include "flashpage/ptx/rcp.h"
#include "flashpage/ptx/warp_max.h"
#include "flashpage/tile/layout/vector4.h"
#include "flashpage/tile/softmax/softmax.h"
#include "flashpage/tile/unit.h"

namespace flashpage {

// Called by one thread, after a barrier that follows the CTA's partial rows. Resets the counter to zero for the next
// launch.
FP_DEVICE bool is_last_arrival(u32* counter, i32 num_pieces) {
  bool last = ptx::add_acquire_release(counter, 1) == static_cast<u32>(num_pieces) - 1;
  if (last) *counter = 0;
  return last;
}

// A job is one row and 128 columns. If there are more warps than jobs, several share one, and each sums some of the
// partials. If there are more jobs, a warp does two or four at a time. merge_rounds counts its loads.
template <class Traits, int warps>
struct ArrivalMerge {
  using Out = typename Traits::Out;
  static constexpr int columns_a_job = 128;
  static constexpr int sums_pitch = columns_a_job + 4;  // floats: the columns, the total and the maximum of a share
  static constexpr int jobs_a_row = ceil_div(Traits::head_dim_vo, columns_a_job);
  static constexpr int barrier = 15;  // name

  const AttentionParams& params;
  const MergeItem& merge;
  int lane;

  // Called by all `warps`; `sums` has one row of columns for each. The launch waits for this merge, so it avoids
  // divisions, and addresses are steps from a row's first partial.
  FP_DEVICE void run(float (*sums)[sums_pitch], int warp) const {
    const int jobs = merge.num_rows * jobs_a_row;
    if constexpr (Traits::tile_q * jobs_a_row > warps) {
      if (jobs > warps) return run_many(jobs, warp, warps);
    }
    int shift = 0;  // log2 of the warps that share a job
    while (jobs << (shift + 1) <= warps && (16 << shift) < merge.num_partials + 16) ++shift;
    const int share = warp & ((1 << shift) - 1);
    Job job[1] = {Job(*this, warp >> shift)};
    sum_partials(job, share, shift);
    if (shift > 0) {
      *reinterpret_cast<float4*>(sums[warp] + lane * 4) = job[0].sum;
      if (lane == 0) sums[warp][columns_a_job] = job[0].total;
      ptx::named_barrier(barrier, warps * 32);
      if (share == 0) add_shares(job[0], 1 << shift, sums + warp);
    }
    if (share == 0) write(job[0]);
  }

  // As `run`, by all of `ctas` CTAs: each does every ctas-th job.
  FP_DEVICE void run_share(int warp, int cta, int ctas) const {
    const int jobs = merge.num_rows * jobs_a_row, first = warp * ctas + cta, step = warps * ctas;
    if (jobs > step) return run_many(jobs, first, step);
    if (first >= jobs) return;
    Job job[1] = {Job(*this, first)};
    sum_partials(job, 0, 0);
    write(job[0]);
  }

 private:
  struct Job {
    int row;
    int column;           // the lane's first column
    bool inside;          // row and column exist
    const float* values;  // of the first partial
    const float* lses;
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
    float maximum = ptx::negative_infinity(), total = 0.f;

    FP_DEVICE Job(const ArrivalMerge& of, int index)
        : row(index / jobs_a_row), column(index % jobs_a_row * columns_a_job + of.lane * 4) {
      inside = row < of.merge.num_rows && column < Traits::head_dim_vo;
      const i64 first = of.merge.partial_row + row;
      values = of.params.partial_out + first * Traits::head_dim_vo + column;
      lses = of.params.partial_lse + first;
    }
  };

  FP_DEVICE void run_many(int jobs, int begin, int step) const {
    constexpr bool are_few = Traits::tile_q * jobs_a_row <= 32;
#pragma unroll 1
    for (int first = begin; first < jobs; first += (are_few ? 2 : 4) * step) {
      if constexpr (are_few) {
        Job mine[] = {Job(*this, first), Job(*this, first + step)};
        sum_and_write(mine);
      } else {
        Job mine[] = {Job(*this, first), Job(*this, first + step), Job(*this, first + 2 * step),
                      Job(*this, first + 3 * step)};
        sum_and_write(mine);
      }
    }
  }

  template <int count>
  FP_DEVICE void sum_and_write(Job (&mine)[count]) const {
    sum_partials(mine, 0, 0);
#pragma unroll
    for (const Job& job : mine) write(job);
  }

  // Sums a warp's share of the partials for all of its jobs at once.
  template <int count>
  FP_DEVICE void sum_partials(Job (&jobs)[count], int share, int shift) const {
    constexpr int batch = 8 / count;  // partials of a job whose loads are in flight at once
    for (int begin = 0; begin < merge.num_partials; begin += 32) {
      const int here = min_of(32, merge.num_partials - begin), mine = (here + (1 << shift) - 1) >> shift;
      const int from = begin + share * mine, to = min_of(begin + here, from + mine);
      float lse[count];
      float4 values[count][batch];
#pragma unroll
      for (int j = 0; j < count; ++j) {
        const bool exists = lane < here && jobs[j].row < merge.num_rows;
        lse[j] = exists ? __ldcg(jobs[j].lses + (begin + lane) * merge.partial_stride) : ptx::negative_infinity();
        load_batch(values[j], jobs[j], from, to);  // in flight before the weights are known
      }
      float weight[count];
#pragma unroll
      for (int j = 0; j < count; ++j) {
        Job& job = jobs[j];
        const float next = fmaxf(job.maximum, ptx::warp_max(lse[j]));
        const float rescale = state_weight(job.maximum, next);
        weight[j] = state_weight(lse[j], next);
        job.maximum = next;
        job.total *= rescale;
        job.sum = scaled(job.sum, rescale);
      }
      for (int p = from; p < to; p += batch) {
#pragma unroll
        for (int j = 0; j < count; ++j) {
          Job& job = jobs[j];
          if (p > from) load_batch(values[j], job, p, to);
#pragma unroll
          for (int i = 0; i < batch; ++i) {
            float of_partial = __shfl_sync(0xffffffff, weight[j], (p - begin + i) & 31);
            if (p + i >= to) of_partial = 0.f;
            job.total += of_partial;
            job.sum = add_scaled(job.sum, values[j][i], of_partial);
          }
        }
      }
    }
  }

  // Loads consecutive partials of one row, all in flight at once; those from `to` on are zero. __ldcg bypasses the L1,
  // because other SMs wrote the partials.
  template <int count>
  FP_DEVICE void load_batch(float4 (&values)[count], const Job& job, int from, int to) const {
    if (!job.inside) to = 0;
    const i64 step = static_cast<i64>(merge.partial_stride) * Traits::head_dim_vo;
    const float* row = job.values + from * step;
#pragma unroll
    for (int i = 0; i < count; ++i, row += step) {
      values[i] = make_float4(0.f, 0.f, 0.f, 0.f);
      if (from + i < to) values[i] = __ldcg(reinterpret_cast<const float4*>(row));
    }
  }

  FP_DEVICE void add_shares(Job& job, int sharers, float (*sums)[sums_pitch]) const {
#pragma unroll
    for (int i = 1; i < warps; ++i) {
      if (i >= sharers) continue;
      job.sum = add_scaled(job.sum, *reinterpret_cast<const float4*>(sums[i] + lane * 4), 1.f);
      job.total += sums[i][columns_a_job];
    }
  }

  FP_DEVICE void write(const Job& job) const {
    if (!job.inside) return;
    PackedRow at = unpack_row(params, merge.kv_head, merge.first_packed_row + job.row);
    store4(out_row(at) + job.column, scaled(job.sum, job.total == 0.f ? 0.f : ptx::reciprocal_approx(job.total)));
    if (job.column == 0 && params.lse) {
      params.lse[static_cast<i64>(merge.q_begin + at.row) * params.num_q_heads + at.head] =
          row_lse(job.maximum, job.total);
    }
  }

  FP_DEVICE Out* out_row(const PackedRow& at) const {
    return static_cast<Out*>(params.out) + (merge.q_begin + at.row) * params.out_row_stride +
           at.head * params.out_head_stride;
  }
};

}  // namespace flashpage
