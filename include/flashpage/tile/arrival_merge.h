// Merging a cut unit inside the attention launch: its pieces count themselves in, the last one combines the partials in
// the plan's order, so that the bits do not depend on who was last.
#pragma once
#include "flashpage/params.h"
#include "flashpage/ptx/atomic.h"
#include "flashpage/ptx/named_barrier.h"
#include "flashpage/ptx/rcp.h"
#include "flashpage/ptx/warp_max.h"
#include "flashpage/tile/softmax.h"
#include "flashpage/tile/unit.h"
#include "flashpage/tile/vector4.h"

namespace flashpage {

// One thread, after a barrier behind the CTA's partial rows. The counter is left at zero for the next launch.
FP_DEVICE bool is_last_arrival(u32* counter, i32 num_pieces) {
  bool last = ptx::add_acquire_release(counter, 1) == static_cast<u32>(num_pieces) - 1;
  if (last) *counter = 0;
  return last;
}

// The rows of a unit that are merged together, and the piece among the partials that is still in shared memory.
struct MergeRound {
  i32 num_rows;
  i32 half;           // row i of the round is row i / 8 * 16 + half * 8 + i % 8 of the unit
  i32 piece;          // -1: all partials are in global memory
  const float* rows;  // of the piece, as its exchange has them: [num_rows, pitch]
  const float* lse;
  i32 pitch;

  FP_DEVICE i32 row(i32 i) const { return i / 8 * 16 + half * 8 + i % 8; }
};

// Columns of a row in the exchange, rotated so that rows of two neighbouring columns meet all banks.
FP_DEVICE int exchange_column(int row, int column) { return column ^ (row & 3) * 8; }

// A job is one row and 128 columns. Where there are more warps than jobs, several share one: each sums a part of the
// partials.
template <class Traits, int warps>
struct ArrivalMerge {
  using Out = typename Traits::Out;
  static constexpr int columns_a_job = 128;
  static constexpr int sums_pitch = columns_a_job + 4;  // floats: the columns, the total and the maximum of a share
  static constexpr int jobs_a_row = ceil_div(Traits::head_dim_vo, columns_a_job);
  static constexpr int barrier = 15;  // name

  const AttentionParams& params;
  const MergeItem& merge;
  const MergeRound& round;
  int lane;

  // By all `warps`; sums: one row of columns for each. What is added up here is waited for: no divisions, and addresses
  // are steps from a row's first partial.
  FP_DEVICE void run(float (*sums)[sums_pitch], int warp) const {
    const int jobs = round.num_rows * jobs_a_row;
    int shift = 0;  // log2 of the warps that share a job
    while (jobs << (shift + 1) <= warps && (16 << shift) < merge.num_partials + 16) ++shift;
    const int share = warp & ((1 << shift) - 1);
    for (int first = 0; first < jobs; first += warps >> shift) {
      const int job = first + (warp >> shift), row = job / jobs_a_row, step = job % jobs_a_row;
      const bool exists = job < jobs && round.row(row) < merge.num_rows;
      if (exists) sum_partials(row, step, share, shift, sums[warp]);
      if (shift == 0) continue;
      ptx::named_barrier(barrier, warps * 32);
      if (exists && share == 0) add_shares(row, step, 1 << shift, sums + warp);
    }
  }

 private:
  // Adds a warp's share of the partials up; who has no one to share with writes the row.
  FP_DEVICE void sum_partials(int row, int step, int share, int shift, float* sums) const {
    const int column = step * columns_a_job + lane * 4;
    const bool inside = column < Traits::head_dim_vo;
    const i64 first = merge.partial_row + round.row(row);
    const float* values = params.partial_out + first * Traits::head_dim_vo + column;
    const float* lses = params.partial_lse + first;
    const float* own = round.rows + row * round.pitch + exchange_column(row, column);
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
    float maximum = ptx::negative_infinity(), total = 0.f;
    for (int begin = 0; begin < merge.num_partials; begin += 32) {
      const int count = min_of(32, merge.num_partials - begin), mine = (count + (1 << shift) - 1) >> shift;
      const int from = begin + share * mine, to = min_of(begin + count, from + mine);
      float lse = ptx::negative_infinity();
      if (lane < count) lse = __ldcg(lses + (begin + lane) * merge.partial_stride);
      Batch batch(*this, values, own, from, inside ? to : 0);  // on its way before the weights are known
      if (begin + lane == round.piece) lse = round.lse[row];
      const float next = fmaxf(maximum, ptx::warp_max(lse));
      const float origin = next == ptx::negative_infinity() ? 0.f : next;
      const float weight = ptx::exp2_approx(lse - origin), rescale = ptx::exp2_approx(maximum - origin);
      maximum = next;
      total *= rescale;
      sum = scaled(sum, rescale);
      for (int p = from; p < to; p += Batch::size) {
        if (p > from) batch = Batch(*this, values, own, p, inside ? to : 0);
#pragma unroll
        for (int i = 0; i < Batch::size; ++i) {
          float of_partial = __shfl_sync(0xffffffff, weight, (p - begin + i) & 31);
          if (p + i >= to) of_partial = 0.f;
          total += of_partial;
          sum = add_scaled(sum, batch.values[i], of_partial);
        }
      }
    }
    if (shift == 0) return write(row, column, sum, maximum, total);
    *reinterpret_cast<float4*>(sums + lane * 4) = sum;
    if (lane == 0) sums[columns_a_job] = total, sums[columns_a_job + 1] = maximum;
  }

  FP_DEVICE void add_shares(int row, int step, int sharers, float (*sums)[sums_pitch]) const {
    float4 sum = *reinterpret_cast<const float4*>(sums[0] + lane * 4);
    float total = sums[0][columns_a_job];
#pragma unroll
    for (int i = 1; i < warps; ++i) {
      if (i >= sharers) continue;
      sum = add_scaled(sum, *reinterpret_cast<const float4*>(sums[i] + lane * 4), 1.f);
      total += sums[i][columns_a_job];
    }
    write(row, step * columns_a_job + lane * 4, sum, sums[0][columns_a_job + 1], total);
  }

  FP_DEVICE void write(int row, int column, const float4& sum, float maximum, float total) const {
    if (column >= Traits::head_dim_vo) return;
    PackedRow at = unpack_row(params, merge.kv_head, merge.first_packed_row + round.row(row));
    store4(out_row(at) + column, scaled(sum, total == 0.f ? 0.f : ptx::reciprocal_approx(total)));
    if (column == 0 && params.lse) {
      params.lse[static_cast<i64>(merge.q_begin + at.row) * params.num_q_heads + at.head] = row_lse(maximum, total);
    }
  }

  FP_DEVICE Out* out_row(const PackedRow& at) const {
    return static_cast<Out*>(params.out) + (merge.q_begin + at.row) * params.out_row_stride +
           at.head * params.out_head_stride;
  }

  // Neighbouring partials of one row, all loads in flight at once; those from `to` on are zero. Past the L1: other SMs
  // wrote them.
  struct Batch {
    static constexpr int size = 8;
    float4 values[size];

    FP_DEVICE Batch(const ArrivalMerge& of, const float* rows, const float* own, int from, int to) {
      const i64 step = static_cast<i64>(of.merge.partial_stride) * Traits::head_dim_vo;
      const float* row = rows + from * step;
#pragma unroll
      for (int i = 0; i < size; ++i, row += step) {
        values[i] = make_float4(0.f, 0.f, 0.f, 0.f);
        if (from + i < to && from + i != of.round.piece) values[i] = __ldcg(reinterpret_cast<const float4*>(row));
      }
#pragma unroll
      for (int i = 0; i < size; ++i)
        if (from + i < to && from + i == of.round.piece) values[i] = *reinterpret_cast<const float4*>(own);
    }
  };
};

}  // namespace flashpage
