// The end of a unit in prefill_sm90: writes its rows to the output or to the partials.
#pragma once
#include "flashpage/kernels/prefill_sm90/order.h"
#include "flashpage/kernels/prefill_sm90/pipeline.h"
#include "flashpage/ptx/compiler.h"
#include "flashpage/ptx/fence.h"
#include "flashpage/ptx/rcp.h"
#include "flashpage/ptx/st_global.h"
#include "flashpage/ptx/stmatrix.h"
#include "flashpage/tile/merge/epilogue.h"
#include "flashpage/tile/product/values.h"
#include "flashpage/tile/softmax/softmax.h"

namespace flashpage {

template <class Traits>
struct PrefillOutput {
  using S = Shape<Traits>;
  using Warps = PrefillWarps<Traits>;
  using Shared = PrefillShared<Traits>;
  using OutRows = typename Shared::OutRows;
  static constexpr int group_barrier = Order<Warps::groups>::end_of_barriers;  // barrier names, one for each group

  const Pipeline<Traits>& pipeline;
  const AttentionParams& params;
  int first_row;  // first row of the warp, in the unit
  int group;
  int lane;

  // The first row of a unit that belongs to this CTA.
  FP_DEVICE int cta_row() const {
    return Traits::ctas == 1 ? 0 : static_cast<int>(ptx::cluster_rank()) * params.cta_rows;
  }

  // Writes a finished unit: to the output through the tile of Q, where rows become whole lines or boxes, or to the
  // partials. Either way, the slot of Q is released once, and the warp that loads the next Q knows what the slot holds.
  FP_DEVICE void write(SoftmaxState<1>& state, float (&values)[S::value_tiles][4], const Place& place, u8* tile) const {
    const WorkItem item = place.item;  // copied once: between stores the compiler would load the place again
    Unit unit = place.unit;
    if constexpr (Traits::ctas > 1) unit.num_rows = min_of(unit.num_rows, cta_row() + params.cta_rows);
    const int first_row = static_cast<int>(ptx::opaque(this->first_row)),
              group = static_cast<int>(ptx::opaque(this->group));
    const bool is_partial = item.partial_row >= 0;
    const float value_scale = out_factor_of<Traits>(params, item, unit.kv_head);
    float sum[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum[half] = quad_sum(state.sum[0][half]);
      // A row that has seen a token has seen its maximum, so its sum is at least one.
      const float inverse = sum[half] > 0.f ? value_scale * ptx::reciprocal_approx(sum[half]) : 0.f;
#pragma unroll
      for (int n = 0; n < S::value_tiles; ++n) {
        values[n][half * 2] *= inverse;
        values[n][half * 2 + 1] *= inverse;
      }
    }
    if (is_partial) {
      pipeline.release_query();
      store_partial(values, item, unit, first_row);
    } else {
      ptx::named_barrier(group_barrier + group, 128);  // all warps of the group have read Q
      put_rows(values, first_row - cta_row(), tile);
      if (Shared::leave_by_boxes(params, item, unit, cta_row())) {
        ptx::fence_before_bulk_copies();
        __syncwarp();
        pipeline.release_query();
      } else {
        copy_out(item, unit, first_row, tile);
      }
    }
    // Stored after the rows, because their fence would wait for these stores.
    if (is_partial || params.lse) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = first_row + half * 8 + lane / 4;
        if (lane % 4 == 0 && row < unit.num_rows)
          *lse_target(params, item, unit, row) = row_lse(state.maximum[0][half], sum[half]);
      }
    }
  }

 private:
  // Writes the warp's rows to the tile, from row `first_row` of the CTA on.
  FP_DEVICE void put_rows(const float (&values)[S::value_tiles][4], int first_row, u8* tile) const {
    using Out = typename Traits::Out;
    if constexpr (is_fp8<Out>) {
      put_fp8_rows(values, first_row, tile);
    } else if constexpr (Warps::multiplies_fp8) {  // a lane's columns of two tiles are neighbours
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        for_each_column_pair<Traits>(values, half, lane, [&](int at, float first, float second) {
          *reinterpret_cast<u32*>(tile + OutRows::byte_offset(first_row + half * 8 + lane / 4, at * 2)) =
              ptx::pack2<Out>(first, second);
        });
      }
    } else {
      const u32 rows = OutRows::lane_address(ptx::shared_address(tile), first_row + lane % 16, lane / 16);
#pragma unroll
      for (int n = 0; n < S::value_tiles; n += 2) {
        u32 matrices[4];  // two of 8 rows of each tile; zeros for columns that do not exist, because Q has its padding
                          // there
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float (&sums)[4] = values[n + i / 2];
          matrices[i] = (n + i / 2) * 8 < S::value_columns ? ptx::pack2<Out>(sums[i % 2 * 2], sums[i % 2 * 2 + 1]) : 0;
        }
        ptx::stmatrix_x4(OutRows::at_chunk(rows, n), matrices);
      }
    }
  }

  // As put_rows: each lane stores words of four neighbouring columns.
  FP_DEVICE void put_fp8_rows(const float (&values)[S::value_tiles][4], int first_row, u8* tile) const {
    using Out = typename Traits::Out;
    static_assert(Traits::head_dim_vo % 16 == 0);
    const bool is_odd = lane % 2 != 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + half * 8 + lane / 4, e = half * 2;
#pragma unroll
      for (int n = 0; n < S::value_tiles; n += 4) {
        const bool has_last = n + 2 < S::value_tiles;  // of the four tiles
        const float (&first)[4] = values[n], (&second)[4] = values[n + 1];
        const float (&third)[4] = values[has_last ? n + 2 : n], (&fourth)[4] = values[has_last ? n + 3 : n + 1];
        u32 words[2];
        int byte = lane % 4 * 4;
        if constexpr (Warps::multiplies_fp8) {
          words[0] = ptx::narrow4<Out>(first[e], second[e], first[e + 1], second[e + 1]);
          words[1] = ptx::narrow4<Out>(third[e], fourth[e], third[e + 1], fourth[e + 1]);
        } else {  // an even lane has columns of the even tiles, with those of the next lane, and an odd lane the others
          u32 even = ptx::narrow4<Out>(first[e], first[e + 1], third[e], third[e + 1]);
          u32 odd = ptx::narrow4<Out>(second[e], second[e + 1], fourth[e], fourth[e + 1]);
          swap_words(1, is_odd, lane, even, odd);
          words[0] = ptx::byte_permute(even, odd, 0x5410);
          words[1] = ptx::byte_permute(even, odd, 0x7632);
          byte = is_odd * 8 + lane % 4 / 2 * 4;
        }
#pragma unroll
        for (int i = 0; i < (has_last ? 2 : 1); ++i)
          *reinterpret_cast<u32*>(tile + OutRows::byte_offset(row, (n + 2 * i) * 8 + byte)) = words[i];
      }
    }
  }

  FP_DEVICE void store_partial(const float (&values)[S::value_tiles][4], const WorkItem& item, const Unit& unit,
                               int first_row) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + half * 8 + lane / 4;
      if (row >= unit.num_rows) continue;
      const i64 offset = out_offset<Traits>(params, item, unit, row);
      for_each_column_pair<Traits>(values, half, lane, [&](int at, float first, float second) {
        store_pair<Traits>(params, true, offset + at, first, second);
      });
    }
  }

  // Copies the warp's rows to the output, 16 bytes in each lane. All are loaded before the first is stored, so that a
  // later Q does not wait for stores.
  FP_DEVICE void copy_out(const WorkItem& item, const Unit& unit, int first_row, const u8* tile) const {
    constexpr int columns = 16 / static_cast<int>(sizeof(typename Traits::Out));  // of a chunk
    constexpr int chunks = Traits::head_dim_vo / columns, parts = ceil_div(16 * chunks, 32);
    uint4 part[parts];
    __syncwarp();
#pragma unroll
    for (int i = 0; i < parts; ++i) {
      const int row = (i * 32 + lane) / chunks, chunk = (i * 32 + lane) % chunks;
      if (row < 16)
        part[i] = *reinterpret_cast<const uint4*>(tile + OutRows::chunk_offset(first_row - cta_row() + row, chunk));
    }
    __syncwarp();
    pipeline.release_query();
    const u64 mine =
        out_offset<Traits>(params, item, unit, first_row + lane % 16);  // each row's offset is computed once
#pragma unroll
    for (int i = 0; i < parts; ++i) {
      const int row = (i * 32 + lane) / chunks, chunk = (i * 32 + lane) % chunks;
      const u64 offset = __shfl_sync(0xffffffff, mine, row) + chunk * columns;
      const bool is_there = row < min_of(16, unit.num_rows - first_row);
      ptx::store_global(static_cast<typename Traits::Out*>(params.out) + offset, part[i], is_there);
    }
  }
};

}  // namespace flashpage
