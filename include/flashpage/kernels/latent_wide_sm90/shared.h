// The shared memory between the warps of latent_wide_sm90.
#pragma once
#include "flashpage/kernels/fitting_stages.h"
#include "flashpage/kernels/wide_units.h"
#include "flashpage/tile/layout/slot_ring.h"
#include "flashpage/tile/layout/swizzled_rows.h"

namespace flashpage {

// The columns of a block of latent rows that are loaded, read for the last time and released together.
enum class WidePart { tail, left, right };

template <class Traits>
struct WideShared {
  using Cache = typename Traits::Cache;
  static constexpr int tokens = 64;  // of a block
  static constexpr int rows = 64;    // packed rows of this CTA
  static constexpr int pair = 2;     // CTAs of a cluster, which load tokens for each other
  static constexpr int unit_rows = rows * Traits::ctas;
  static constexpr int slots_ahead = 2, places_ahead = 2, parts = 3;
  using Tile = SwizzledRows<Cache, Traits::head_dim_qk, tokens>;  // a block, or Q
  static constexpr int value_panels = Traits::head_dim_vo / Tile::panel_columns, half_panels = value_panels / 2;
  static constexpr int tail_panels = Tile::panels - value_panels;
  static constexpr int loading_parts = tail_panels > 0 ? 3 : 2;
  static_assert(Traits::tile_kv == tokens && Traits::tile_q == rows && Traits::head_dim_qk % 64 == 0);
  static_assert(value_panels % 2 == 0 && tail_panels <= 1 && Traits::ctas % pair == 0 &&
                Traits::loader == Loader::boxes);

  FP_HOST_DEVICE static constexpr int first_panel(WidePart part) {
    return part == WidePart::tail ? value_panels : part == WidePart::left ? 0 : half_panels;
  }
  FP_HOST_DEVICE static constexpr int panels_of(WidePart part) {
    return part == WidePart::tail ? tail_panels : half_panels;
  }

  alignas(1024) u8 query[Tile::tile_bytes];
  alignas(1024) u8 slots[slots_ahead][Tile::tile_bytes];
  // What the two threads with the same rows pass to each other, one in each warpgroup: probabilities and maxima.
  alignas(128) uint4 probabilities[4][32 * WideWarps::group];
  float2 maxima[32 * WideWarps::group];
  float sums[2][rows];  // of the warpgroups
  WidePlace places[places_ahead];
  PlaceCursor cursor;
  u64 full[slots_ahead][Tile::panels];
  u64 empty[slots_ahead][parts];
  // Barriers of computing warps, at which all lanes arrive.
  u64 handed_over[2][WideWarps::group];  // by each warp of a warpgroup, to the other one's warp with the same rows
  u64 met[WideWarps::group];             // the two warps with the same rows
  u64 cleared[2];                        // the warps of a warpgroup
  SlotRing<places_ahead> place_ring;
  SlotRing<1> query_ring;

  // Called by one thread.
  FP_DEVICE void init() {
    for (auto& slot : full)
      for (u64& barrier : slot) ptx::mbarrier_init(ptx::shared_address(&barrier), 1);
    for (auto& slot : empty)
      for (u64& barrier : slot) ptx::mbarrier_init(ptx::shared_address(&barrier), WideWarps::group * pair);
    for (auto& warpgroup : handed_over)
      for (u64& barrier : warpgroup) ptx::mbarrier_init(ptx::shared_address(&barrier), 32);
    for (u64& barrier : met) ptx::mbarrier_init(ptx::shared_address(&barrier), 32 * 2);
    for (u64& barrier : cleared) ptx::mbarrier_init(ptx::shared_address(&barrier), 32 * WideWarps::group);
    place_ring.init(1, 32 * (WideWarps::computing + loading_parts));
    query_ring.init(32, WideWarps::computing);
    ptx::mbarrier_init_fence();
  }

  // `use` counts the blocks of all units.
  FP_DEVICE static u32 slot(u32 use) { return use % slots_ahead; }
  FP_DEVICE u32 block(u32 use) const { return ptx::shared_address(slots[slot(use)]); }
  FP_DEVICE u32 full_barrier(u32 use, int panel) const { return ptx::shared_address(&full[slot(use)][panel]); }
  FP_DEVICE void wait_full(u32 use, int panel) const {
    ptx::mbarrier_wait(full_barrier(use, panel), use / slots_ahead & 1);
  }
  FP_DEVICE u32 empty_barrier(u32 use, WidePart part) const {
    return ptx::shared_address(&empty[slot(use)][static_cast<int>(part)]);
  }
  FP_DEVICE void wait_empty(u32 use, WidePart part) const {
    ptx::mbarrier_wait(empty_barrier(use, part), (use / slots_ahead & 1) ^ 1);
  }
  // Called by each warp that has read the part: releases it to the loading warps of both CTAs, which load blocks
  // together.
  FP_DEVICE void release(u32 use, WidePart part, int lane) const {
    if (lane < pair) ptx::mbarrier_arrive_at(empty_barrier(use, part), lane);
  }
};

}  // namespace flashpage
