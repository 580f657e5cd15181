// The loading warps of latent_columns_sm90: one goes through the plan and loads Q, two convert the tail of rows, and
// four convert the values.
#pragma once
#include "flashpage/kernels/latent_columns_sm90/convert.h"
#include "flashpage/ptx/cp_async.h"
#include "flashpage/tile/load/query.h"

namespace flashpage {

template <class Traits>
struct ColumnsLoad {
  using Shared = ColumnsShared<Traits>;
  using Tile = typename Shared::Tile;

  Shared& shared;
  const AttentionParams& params;
  WideUnits<Traits, Shared> units;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  FP_DEVICE ColumnsLoad(Shared& shared, const AttentionParams& params)
      : shared(shared), params(params), units(shared, params) {}

  FP_DEVICE void run() {
    if (warp == Shared::Warps::plan_warp)
      return units.plan([&](const Place& place, u32 use) { load_query(place, use); });
    if constexpr (Tile::tail_columns > 0) {
      if (warp < Shared::sharers)
        units.load_blocks(ColumnsConvert<Traits, true>(shared, params, ColumnsPart::tail), false);
    }
  }

  // The work of the converting warps.
  FP_DEVICE void convert_values() const {
    const int converter = warp - Shared::Warps::first_converter;
    const auto part = static_cast<ColumnsPart>(converter / Shared::sharers);
    units.load_blocks(ColumnsConvert<Traits, false>(shared, params, part), converter == 0);
  }

 private:
  // Loads this CTA's columns of the unit's rows; rows that do not exist become zero.
  FP_DEVICE void load_query(const Place& place, u32 use) const {
    const int rank = static_cast<int>(ptx::cluster_rank());
    shared.query_ring.wait_empty(use);
#pragma unroll 1
    for (int first = 0; first < Shared::unit_rows; first += 32) {
      const u64 mine = reinterpret_cast<u64>(static_cast<const typename Traits::Cache*>(params.q) +
                                             query_offset(params, place.item, place.unit, first + lane)) +
                       rank * Tile::value_columns * sizeof(typename Traits::Cache);
      const i32 count = place.unit.num_rows - first;
      const u32 to = ptx::shared_address(shared.query) + first / Tile::rows * Tile::bytes;
      copy_values(to, mine, first % Tile::rows, count);
      if constexpr (Tile::tail_columns > 0) copy_tail(to, mine + to_tail(rank), first % Tile::rows, count);
    }
    ptx::mbarrier_arrive_after_copies(shared.query_ring.full_barrier(use));
  }
  // Bytes from the CTA's first value column to its first tail column.
  FP_DEVICE static int to_tail(int rank) {
    return static_cast<int>(sizeof(typename Traits::Cache)) *
           (Traits::head_dim_vo + rank * (Tile::tail_columns - Tile::value_columns));
  }

  // Copies 32 rows from `first_row` on, of which `count` exist. `mine`: the source of the lane's row.
  FP_DEVICE void copy_values(u32 to, u64 mine, int first_row, i32 count) const {
    constexpr int chunks = Tile::value_chunks, rows_a_pass = 32 / chunks, together = 2;
#pragma unroll together
    for (int i = 0; i < 32; i += rows_a_pass) {
      const int row = i + lane / chunks, chunk = lane % chunks;
      const u64 from = __shfl_sync(0xffffffff, mine, row);
      ptx::cp_async<16>(to + Tile::chunk_offset(first_row + row, chunk),
                        reinterpret_cast<const void*>(from + chunk * 16), row < count);
    }
  }
  FP_DEVICE void copy_tail(u32 to, u64 mine, int first_row, i32 count) const {
    constexpr int chunks = Tile::tail_chunks, rows_a_pass = 32 / chunks;
#pragma unroll 2
    for (int i = 0; i < 32; i += rows_a_pass) {
      const int row = i + lane / chunks, chunk = lane % chunks;
      const u64 from = __shfl_sync(0xffffffff, mine, row);
      ptx::cp_async<16>(to + Tile::tail_offset(first_row + row, chunk),
                        reinterpret_cast<const void*>(from + chunk * 16), row < count);
    }
  }
};

}  // namespace flashpage
