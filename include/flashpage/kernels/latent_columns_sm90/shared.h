// The shared memory between the warps of latent_columns_sm90.
#pragma once
#include "flashpage/kernels/fitting_stages.h"
#include "flashpage/kernels/latent_columns_sm90/tile.h"
#include "flashpage/kernels/wide_units.h"
#include "flashpage/tile/layout/slot_ring.h"

namespace flashpage {

// The roles of the warps. A second loading warpgroup converts the value columns.
struct ColumnsWarps {
  static constexpr int first_converter = 4, converters = 4;
  static constexpr int loading = first_converter + converters;  // whole warpgroups, because setmaxnreg works on them
  static constexpr int group = 4;                               // warps of a computing warpgroup
  static constexpr int groups = 2;                              // computing warpgroups
  static constexpr int computing = group * groups;
  static constexpr int threads = 32 * (loading + computing);
  static constexpr int plan_warp = 3;                      // goes through the plan and loads Q
  static constexpr int first_registers = 65536 / threads;  // of a thread, when the launch begins
  // Warpgroups share the registers of the launch; one that takes more than are left waits for ever.
  static constexpr bool fit(int of_loading, int of_computing, int of_converting) {
    return first_converter * of_loading + converters * of_converting + computing * of_computing <=
           (loading + computing) * first_registers;
  }
};

template <class Traits>
struct ColumnsShared {
  using Warps = ColumnsWarps;
  using Cache = typename Traits::Cache;
  using Tile = ColumnsTile<Traits>;
  using Format = typename LatentFormatOf<Traits, Traits::latent_format>::type;
  static constexpr int tokens = Tile::rows;      // of a block
  static constexpr int group_rows = Tile::rows;  // packed rows of a warpgroup
  static constexpr int unit_rows = Traits::tile_q * Traits::ctas;
  // Units of few rows: both warpgroups have all rows, and take blocks in turn.
  static constexpr bool takes_turns = unit_rows == group_rows;
  static constexpr int row_tiles = unit_rows / group_rows;
  static constexpr int readers = takes_turns ? Warps::group : Warps::computing;  // warps, of a slot
  static constexpr int slots_ahead = Traits::stages, places_ahead = 2;
  static constexpr bool is_selected = Traits::kv_source == KvSource::selected;
  static_assert(converts_latents<Traits>, "latent_wide_sm90 takes rows that need no conversion");
  using Present = PresentTokens<Traits::kv_source>;
  // Two warps convert a part, each the rows of half of the tokens.
  static constexpr int sharers = 2;
  static constexpr int converting_lanes = 32 * sharers;  // of a part; all arrive at its barrier
  // Registers of a thread. Where warpgroups take turns, converting warps read ahead (ColumnsConvert::reads_ahead). The
  // registers for that come from the computing warps or, without a tail to convert, from the loading ones.
  static constexpr bool has_tail = Tile::tail_columns > 0;
  static constexpr int loading_registers = has_tail ? 48 : 40;
  static constexpr int converting_registers = !takes_turns ? 48 : has_tail ? 64 : 56;
  static constexpr int computing_registers = takes_turns && has_tail ? 200 : 208;
  static constexpr int pieces_ahead = 8;  // of 16 bytes, of each lane of a converting warp: a block
  static_assert(Warps::fit(loading_registers, computing_registers, converting_registers));
  static_assert(!takes_turns || slots_ahead % 2 == 0);
  static_assert(Traits::tile_kv == tokens && Traits::ctas == 2 && unit_rows % group_rows == 0 && row_tiles <= 2);

  alignas(1024) u8 query[row_tiles][Tile::bytes];
  alignas(1024) u8 slots[slots_ahead][Tile::bytes];
  // The other CTA's sums of scores, for each thread of a warpgroup. They also pass values between the warpgroups.
  alignas(128) float4 received[Warps::groups][tokens / 8][32 * Warps::group];
  float2 states[Warps::groups][group_rows];                     // maxima and sums, where warpgroups take turns
  Present present[is_selected ? slots_ahead : 1][tokens / 32];  // of a slot
  alignas(16) u8 arriving[Tile::loaded_parts][sharers][pieces_ahead][32][16];
  WidePlace places[places_ahead];
  PlaceCursor cursor;
  u64 full[slots_ahead][columns_parts];
  u64 empty[slots_ahead];
  u64 scores_full[Warps::computing], scores_read[Warps::computing];  // of each warp's part of `received`
  u64 met[takes_turns ? Warps::group : 1];  // of the two computing warps with the same rows; all lanes arrive
  SlotRing<places_ahead> place_ring;
  SlotRing<1> query_ring;

  // Called by one thread.
  FP_DEVICE void init() {
    for (auto& slot : full)
      for (u64& barrier : slot) ptx::mbarrier_init(ptx::shared_address(&barrier), converting_lanes);
    for (u64& barrier : empty) ptx::mbarrier_init(ptx::shared_address(&barrier), readers);
    for (u64& barrier : scores_full) ptx::mbarrier_init(ptx::shared_address(&barrier), 1);
    for (u64& barrier : scores_read) ptx::mbarrier_init(ptx::shared_address(&barrier), 1);
    for (u64& barrier : met) ptx::mbarrier_init(ptx::shared_address(&barrier), 32 * 2);
    place_ring.init(1, 32 * (Warps::computing + Tile::loaded_parts * sharers));
    query_ring.init(32, Warps::computing);
    ptx::mbarrier_init_fence();
  }

  // `use` counts the blocks of all units.
  FP_DEVICE static u32 slot(u32 use) { return use % slots_ahead; }
  FP_DEVICE u32 block(u32 use) const { return ptx::shared_address(slots[slot(use)]); }
  FP_DEVICE u32 full_barrier(u32 use, ColumnsPart part) const {
    return ptx::shared_address(&full[slot(use)][static_cast<int>(part)]);
  }
  FP_DEVICE void wait_full(u32 use, ColumnsPart part) const {
    ptx::mbarrier_wait(full_barrier(use, part), use / slots_ahead & 1);
  }
  FP_DEVICE void wait_empty(u32 use) const {
    ptx::mbarrier_wait(ptx::shared_address(&empty[slot(use)]), (use / slots_ahead & 1) ^ 1);
  }
  // Called by each warp that has read the block.
  FP_DEVICE void release(u32 use, int lane) const {
    if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&empty[slot(use)]));
  }
};

template <class Traits>
struct ColumnsFits {
  static constexpr bool value = sizeof(ColumnsShared<Traits>) <= cta_shared_bytes(1);
};

// Given with as many slots as fit, at most Given::stages. Where warpgroups take turns, each slot belongs to one of
// them: a warpgroup that waits for a slot of the other could take an older use of it for its own.
template <class Given>
struct ColumnsStages {
  static constexpr int step = ColumnsShared<Given>::takes_turns ? 2 : 1;
  using Traits = WithStages<Given, fitting_stages<ColumnsFits, Given, Given::stages, step, 2>()>;
};

}  // namespace flashpage
