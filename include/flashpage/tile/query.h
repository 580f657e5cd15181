// A unit's query rows into shared memory, in the column order that the score product wants.
#pragma once
#include "flashpage/tile/copy.h"
#include "flashpage/tile/rope.h"
#include "flashpage/tile/scores.h"
#include "flashpage/tile/unit.h"

namespace flashpage {

// Element offset of a unit's row in q; a row beyond the unit gives its last one.
FP_DEVICE i64 query_offset(const AttentionParams& params, const WorkItem& item, const Unit& unit, i32 row) {
  PackedRow at = unpack_row(params, unit.kv_head, unit.first_row + min_of(row, unit.num_rows - 1));
  return (item.q_begin + at.row) * params.q_row_stride + at.head * params.q_head_stride;
}

// Issues the copies of all `threads`; rows beyond the unit become zero. offset(row) is query_offset.
template <class Traits, int threads = Shape<Traits>::threads, class Offset>
FP_DEVICE void load_query(u32 destination, const AttentionParams& params, const Unit& unit, int thread,
                          Offset&& offset) {
  using S = Shape<Traits>;
  using Query = typename S::Query;
  auto source = [&](u32 row) { return static_cast<const Query*>(params.q) + offset(row); };
  if constexpr (is_fp8<typename S::Key>) {
    constexpr int pairs = Traits::head_dim_qk / 2;
#pragma unroll 4
    for (int i = thread; i < Traits::tile_q * pairs; i += threads) {
      u32 row = i / pairs, pair = i % pairs;
      ptx::cp_async<4>(destination + S::QueryRows::byte_offset(row, fp8_pair_order(pair) * 4), source(row) + pair * 2,
                       static_cast<i32>(row) < unit.num_rows);
    }
  } else if constexpr (threads == 32) {  // few lanes: a loop, whose registers do not grow with the tile
    constexpr int bytes = copy_bytes<Query, Traits::head_dim_qk>, chunks = S::QueryRows::used_bytes / bytes;
#pragma unroll 4
    for (int i = thread; i < Traits::tile_q * chunks; i += threads) {
      int row = i / chunks, byte = i % chunks * bytes;
      ptx::cp_async<bytes>(destination + S::QueryRows::byte_offset(row, byte),
                           reinterpret_cast<const u8*>(source(row)) + byte, row < unit.num_rows);
    }
  } else {
    RowCopy<Query, Traits::head_dim_qk, threads>::template run<Traits::tile_q>(destination, thread, unit.num_rows,
                                                                               source);
  }
}

// After the copies have landed and the CTA has met.
template <class Traits>
FP_DEVICE void rotate_query(u8* tile, const AttentionParams& params, const WorkItem& item, const Unit& unit,
                            int thread) {
  using S = Shape<Traits>;
  using Query = typename S::Query;
  rotate_rows<Query, Query, Traits::head_dim_qk>(
      tile, tile, Traits::tile_q, params.rope_scale, params.rope_theta, thread, S::threads, [&](int row) {
        i32 packed = unit.first_row + min_of(row, unit.num_rows - 1);
        return static_cast<float>(query_position(item, unpack_row(params, unit.kv_head, packed).row));
      });
}

}  // namespace flashpage
