// Combines the parts that the CTAs of kernels/blocks/decode.h wrote: one CTA for each row of a cut unit (v1), or of
// every sequence with several partitions (v2).
#pragma once
#include "flashpage/kernels/blocks/steps.h"
#include "flashpage/params/block_params.h"
#include "flashpage/ptx/griddepcontrol.h"
#include "flashpage/ptx/warp_max.h"
#include "flashpage/tile/layout/vector4.h"
#include "flashpage/tile/softmax/state_weight.h"

namespace flashpage {

template <class Traits>
struct BlockMerge {
  using Out = typename Traits::Out;
  static constexpr int warps = 8, threads = 32 * warps;
  static constexpr int most_columns = 256, columns_a_step = 32 * 4;

  struct Shared {
    float4 sums[warps][most_columns / 4];
    float totals[warps];
  };
  static constexpr int shared_bytes = sizeof(Shared), ctas_per_sm = 2, cluster_rows = 0;

  // A row and its number of parts, which have weights in base 2 and normalised values.
  struct Row {
    i32 sequence, head, num_parts;
  };

  FP_DEVICE static void run(const BlockAttentionParams& params) {
    ptx::grid_dependency_wait();
    if (params.partitions) {
      const i32 sequence = blockIdx.x / params.num_q_heads, head = blockIdx.x % params.num_q_heads;
      const i32 length = min_of(params.seq_lens[sequence], params.max_tokens);
      const i64 first = static_cast<i64>(blockIdx.x) * params.partitions;
      const Out* values = static_cast<const Out*>(params.tmp_out);
      merge(
          params, Row{sequence, head, ceil_div(length, BlockWork<16>::partition_tokens)},
          [&](int part) { return params.max_logits[first + part] * log2_e + log2f(params.exp_sums[first + part]); },
          [&](int part, int column) { return load4(values + (first + part) * params.head_dim + column); });
    } else {
      const i32 rows = min_of(params.tile_q, params.group), row = blockIdx.x % rows, cta = blockIdx.x / rows;
      const BlockCut cut = params.cuts[cta];
      auto at = [&](int part) { return static_cast<i64>(2 * (cta + part) + (part == 0)) * params.tile_q + row; };
      merge(
          params, Row{cut.sequence, cut.first_head + row, row < cut.num_rows ? cut.num_pieces : 0},
          [&](int part) { return params.partial_lse[at(part)]; },
          [&](int part, int column) { return load4(params.partial_out + at(part) * params.head_dim + column); });
    }
    ptx::grid_dependency_launch();
  }

 private:
  template <class Lse, class Values>
  FP_DEVICE static void merge(const BlockAttentionParams& params, const Row& row, Lse&& lse, Values&& values) {
    extern __shared__ __align__(16) u8 memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    if (row.num_parts < 2) return;  // already written, or no tokens
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float maximum = ptx::negative_infinity();
    for (int i = lane; i < row.num_parts; i += 32) maximum = fmaxf(maximum, lse(i));
    maximum = ptx::warp_max(maximum);
    const float origin = finite_or_zero(maximum);
    // Each warp sums every `warps`-th part.
    float4 sums[most_columns / columns_a_step] = {};
    float total = 0.f;
#pragma unroll 4
    for (int part = warp; part < row.num_parts; part += warps) {
      const float weight = ptx::exp2_approx(lse(part) - origin);
      total += weight;
#pragma unroll
      for (int i = 0; i < most_columns / columns_a_step; ++i) {
        const int column = i * columns_a_step + lane * 4;
        if (column < params.head_dim) sums[i] = add_scaled(sums[i], values(part, column), weight);
      }
    }
#pragma unroll
    for (int i = 0; i < most_columns / columns_a_step; ++i) shared.sums[warp][i * 32 + lane] = sums[i];
    if (lane == 0) shared.totals[warp] = total;
    __syncthreads();
    for (int i = threadIdx.x; i * 4 < params.head_dim; i += threads) {
      float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
      float of_all = 0.f;
#pragma unroll
      for (int w = 0; w < warps; ++w) {
        sum = add_scaled(sum, shared.sums[w][i], 1.f);
        of_all += shared.totals[w];
      }
      Out* out =
          static_cast<Out*>(params.out) + row.sequence * params.out_row_stride + row.head * params.out_head_stride;
      store4(out + i * 4, scaled(sum, of_all > 0.f ? 1.f / of_all : 0.f));
    }
  }
};

}  // namespace flashpage
