// Loads a unit's query rows to shared memory, in the column order that the score product reads.
#pragma once
#include "flashpage/tile/load/copy.h"
#include "flashpage/tile/product/scores.h"
#include "flashpage/tile/rope/rope.h"
#include "flashpage/tile/unit.h"

namespace flashpage {

// The element offset of a unit's row in q; the unit's last row if that row does not exist.
FP_DEVICE i64 query_offset(const AttentionParams& params, const WorkItem& item, const Unit& unit, i32 row) {
  PackedRow at = unpack_row(params, unit.kv_head, unit.first_row + min_of(row, unit.num_rows - 1));
  return (item.q_begin + at.row) * params.q_row_stride + at.head * params.q_head_stride;
}

// Whether Q's pairs are in the order of the keys' bytes (fp8_pair_order). Rows are then written including their
// padding, which lies between pairs.
template <class Traits>
inline constexpr bool query_follows_bytes = Shape<Traits>::key_bits == 8 && !Shape<Traits>::fp8_products &&
                                            !(Shape<Traits>::rotate && Traits::head_dim_qk % 32 != 0);

// The columns of a row in shared memory that load_query writes.
template <class Traits>
inline constexpr int query_columns =
    query_follows_bytes<Traits> ? round_up(Traits::head_dim_qk, 16) : Traits::head_dim_qk;

// Widens fp8 queries to 16 bits in registers, eight elements at a time; each thread has `batch` loads in flight. It
// uses ordinary stores, so a barrier makes them visible.
template <class Traits, int threads, int batch, class Offset>
FP_DEVICE void widen_query(u32 destination, const AttentionParams& params, const Unit& unit, int thread,
                           Offset&& offset) {
  using S = Shape<Traits>;
  using Stored = typename Traits::StoredQuery;
  constexpr int eights = query_columns<Traits> / 8, total = Traits::tile_q * eights;
#pragma unroll 1
  for (int first = thread; first < total; first += batch * threads) {
    uint2 bytes[batch];
#pragma unroll
    for (int n = 0; n < batch; ++n) {
      i32 row = (first + n * threads) / eights, column = (first + n * threads) % eights * 8;
      bytes[n] = make_uint2(0, 0);
      if (row < unit.num_rows && row < Traits::tile_q && column < Traits::head_dim_qk)
        bytes[n] = *reinterpret_cast<const uint2*>(static_cast<const Stored*>(params.q) + offset(row) + column);
    }
#pragma unroll
    for (int n = 0; n < batch; ++n) {
      u32 row = (first + n * threads) / eights, pair = (first + n * threads) % eights * 4;
      if (row >= Traits::tile_q) continue;
      u32 pairs[4];
      ptx::widen4<typename S::Query, Stored>(bytes[n].x, pairs[0], pairs[1]);
      ptx::widen4<typename S::Query, Stored>(bytes[n].y, pairs[2], pairs[3]);
      if constexpr (query_follows_bytes<Traits>) {
        auto address = [&](u32 of) { return destination + S::QueryRows::byte_offset(row, fp8_pair_order(of) * 4); };
        ptx::store_shared(address(pair), pairs[0], pairs[2]);
        ptx::store_shared(address(pair + 1), pairs[1], pairs[3]);
      } else {
        u32 address = destination + S::QueryRows::byte_offset(row, pair * 4);
        ptx::store_shared(address, pairs[0], pairs[1]);
        ptx::store_shared(address + 8, pairs[2], pairs[3]);
      }
    }
  }
}

// Issues the copies of all `threads`; rows from num_rows on become zero. source(row) returns a row's first element.
template <class Traits, int threads, class Source>
FP_DEVICE void copy_query(u32 destination, i32 num_rows, int thread, Source&& source) {
  using S = Shape<Traits>;
  using Query = typename S::Query;
  if constexpr (query_follows_bytes<Traits>) {
    constexpr int pairs = query_columns<Traits> / 2;
#pragma unroll 4
    for (int i = thread; i < Traits::tile_q * pairs; i += threads) {
      u32 row = i / pairs, pair = i % pairs;
      bool is_padding = pairs * 2 > Traits::head_dim_qk && pair * 2 >= Traits::head_dim_qk;
      ptx::cp_async<4>(destination + S::QueryRows::byte_offset(row, fp8_pair_order(pair) * 4), source(row) + pair * 2,
                       static_cast<i32>(row) < num_rows && !is_padding);
    }
  } else if constexpr (threads == 32) {  // few lanes: a loop whose registers do not grow with the tile
    constexpr int bytes = copy_bytes<Query, Traits::head_dim_qk>, chunks = S::QueryRows::used_bytes / bytes;
#pragma unroll 4
    for (int i = thread; i < Traits::tile_q * chunks; i += threads) {
      int row = i / chunks, byte = i % chunks * bytes;
      ptx::cp_async<bytes>(destination + S::QueryRows::byte_offset(row, byte),
                           reinterpret_cast<const u8*>(source(row)) + byte, row < num_rows);
    }
  } else {
    RowCopy<Query, Traits::head_dim_qk, threads>::template run<Traits::tile_q>(destination, thread, num_rows, source);
  }
}

// Loads the rows of a unit; offset(row) returns query_offset.
template <class Traits, int threads = Shape<Traits>::threads, class Offset>
FP_DEVICE void load_query(u32 destination, const AttentionParams& params, const Unit& unit, int thread,
                          Offset&& offset) {
  using S = Shape<Traits>;
  if constexpr (is_fp8<typename Traits::StoredQuery> && !S::fp8_products) {
    // A single warp waits for every batch, so it takes large ones; next to accumulators few registers are free.
    constexpr bool has_registers = S::value_tiles <= 16 && !(S::rotate && Traits::tile_q > 32);
    constexpr int batch = threads == 32 ? (has_registers ? 8 : 4) : Traits::warps_q > 1 ? 2 : 4;
    widen_query<Traits, threads, batch>(destination, params, unit, thread, offset);
  } else {
    copy_query<Traits, threads>(destination, unit.num_rows, thread,
                                [&](u32 row) { return static_cast<const typename S::Query*>(params.q) + offset(row); });
  }
}

// Rotates the queries in place, after the copies have landed and a barrier of the CTA.
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
