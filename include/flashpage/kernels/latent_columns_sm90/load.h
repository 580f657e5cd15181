// The loading warps of latent_columns_sm90: one goes through the plan and loads Q; three load a part of the columns
// each.
#pragma once
#include "flashpage/kernels/latent_columns_sm90/convert.h"
#include "flashpage/ptx/cache_policy.h"
#include "flashpage/ptx/cp_async.h"
#include "flashpage/tile/load/kv_rows.h"
#include "flashpage/tile/load/query.h"

namespace flashpage {

// Where a part's columns are: the tail has a view of its own, which is K's second half.
template <class Traits, ColumnsPart part>
struct PartColumns {
  using Tile = ColumnsTile<Traits>;
  static constexpr bool is_tail = part == ColumnsPart::tail;
  static constexpr int panels = is_tail ? 1 : Tile::part_panels;
  static constexpr int first_panel = part == ColumnsPart::second ? Tile::part_panels : 0;
  static constexpr int stride = is_tail ? Tile::tail_stride : 128;  // bytes from row to row in shared memory
  static constexpr int offset = is_tail ? Tile::tail : first_panel * Tile::panel_bytes;  // in a block

  FP_DEVICE static const KvView& view(const AttentionParams& params) { return is_tail ? params.v : params.k; }
  FP_DEVICE static i32 first_column() { return Tile::template first_column<is_tail>(part); }
};

// Loads a part by cp.async, row by row, from pages of any size. A lane looks up the pages of its two tokens of a block
// while the block before is loaded.
template <class Traits, ColumnsPart part>
struct ColumnsRows {
  using Shared = ColumnsShared<Traits>;
  using Tile = typename Shared::Tile;
  using Cache = typename Traits::Cache;
  using Columns = PartColumns<Traits, part>;
  using Rows = KvRows<Traits::kv_source>;
  using Present = typename Shared::Present;
  static constexpr int tokens = Shared::tokens, groups = tokens / 32;
  static constexpr int chunks = Columns::panels * Columns::stride / 16;  // of a row

  Shared& shared;
  const AttentionParams& params;
  const WidePlace* place;  // in shared memory, because these warps have few registers
  i32 found[groups];

  FP_DEVICE ColumnsRows(Shared& shared, const AttentionParams& params) : shared(shared), params(params) {}

  FP_DEVICE void open(const WidePlace& next) {
    place = &next;
    look_up(0);
  }

  FP_DEVICE void load(int block, u32 use) {
    const Rows rows(params, place->place.item.kv_offset);
    const i32 count = place->place.unit.kv_end - place->first_token - block * tokens;
    u64 mine[groups];
    Present present[groups];
#pragma unroll
    for (int group = 0; group < groups; ++group) {
      present[group] = Present::of_lanes(count - group * 32, found[group]);
      if constexpr (Shared::is_selected) found[group] = max_of(found[group], 0);
      mine[group] = reinterpret_cast<u64>(rows.template row<Cache>(Columns::view(params), found[group],
                                                                   token_of(block, group), 0, Columns::first_column()));
    }
    look_up(block + 1);
    shared.wait_empty(use);
#pragma unroll
    for (int group = 0; group < groups; ++group)
      copy(shared.block(use) + group * 32 * Columns::stride, mine[group], present[group]);
    if (Shared::is_selected && part == ColumnsPart::first && threadIdx.x % 32 == 0) {
#pragma unroll
      for (int group = 0; group < groups; ++group) shared.present[Shared::slot(use)][group] = present[group];
      ptx::mbarrier_arrive(shared.full_barrier(use, part));
    }
    ptx::mbarrier_arrive_after_copies(shared.full_barrier(use, part));
  }

 private:
  // The lane's token, or the unit's last one.
  FP_DEVICE i32 token_of(int block, int group) const {
    const i32 token = place->first_token + block * tokens + group * 32 + static_cast<int>(threadIdx.x % 32);
    return min_of(token, place->place.unit.kv_end - 1);
  }
  FP_DEVICE void look_up(int block) {
    const Rows rows(params, place->place.item.kv_offset);
#pragma unroll
    for (int group = 0; group < groups; ++group)
      found[group] = place->place.unit.kv_end > 0 ? rows.look_up(token_of(block, group)) : 0;
  }

  // Copies the rows of those of 32 tokens that exist; others become zero. `mine`: the row of this lane's token.
  FP_DEVICE static void copy(u32 to, u64 mine, Present present) {
    constexpr int rows_a_pass = 32 / chunks, batch = min_of(Shared::takes_turns ? 8 : 4, 32 / rows_a_pass);
    static_assert(32 % chunks == 0 && 32 % (batch * rows_a_pass) == 0);
    const int lane = threadIdx.x % 32, lane_row = lane / chunks, lane_chunk = lane % chunks;
    const u64 policy = ptx::evict_first();
#pragma unroll 1
    for (int begin = 0; begin < 32; begin += batch * rows_a_pass) {
      // Reads all sources before it issues the copies: ptxas makes a cp.async wait for earlier shuffles.
      u64 from[batch];
#pragma unroll
      for (int i = 0; i < batch; ++i)
        from[i] = __shfl_sync(0xffffffff, mine, begin + i * rows_a_pass + lane_row) + lane_chunk * 16;
#pragma unroll
      for (int i = 0; i < batch; ++i) {
        const int row = begin + i * rows_a_pass + lane_row;
        const u32 here = Columns::is_tail ? Tile::tail_offset(row, lane_chunk)
                                          : Columns::offset + Tile::chunk_offset(row, lane_chunk);
        ptx::cp_async<16>(to + here, reinterpret_cast<const void*>(from[i]), present.has(row), policy);
      }
    }
  }
};

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
    if constexpr (!Shared::converts) {
      if (warp == 0) return load_part<ColumnsPart::first>();
      if (warp == 1) return load_part<ColumnsPart::second>();
      if constexpr (Tile::tail_columns > 0) {
        if (warp == 2) load_part<ColumnsPart::tail>();
      }
    } else if constexpr (Tile::tail_columns > 0) {
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
  template <ColumnsPart part>
  FP_DEVICE void load_part() const {
    units.load_blocks(ColumnsRows<Traits, part>(shared, params), part == ColumnsPart::first);
  }

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
